"""The digests of the reference networks: plans and trials are found by them, so no change of the
code, and no release of torch, may move one.

If a graph changes on purpose, stored plans of the earlier graph do not fit any more: say in the
changelog why, and how they are carried over.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import DTYPES, TensorType
from plantune.models.registry import network

# Of the layers alone, and of earlier releases, with names.
STORED: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / "digests.json").read_text("utf-8")
)
BATCH = 8


@pytest.mark.parametrize("key", STORED)
def test_a_digest_is_the_stored_one(key: str) -> None:
    name, mode, dtype, channels, weights = key.split()
    spec, in_channels = network(name), int(channels)
    module = spec.build(in_channels).to(DTYPES[dtype]).train(mode == "train")
    type_ = TensorType(spec.input_shape(BATCH, in_channels), dtype)
    graph = extract(module, type_, fold=weights == "folded")
    graph = differentiate(graph) if mode == "train" else graph
    assert [graph.digest, graph.named_digest] == STORED[key]
