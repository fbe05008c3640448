"""Extraction holds on to nothing of the process: other threads go on while a module is traced."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plantune.errors import UnsupportedModule
from plantune.graph.tracing.extract import extract
from plantune.graph.tracing.trace import TRACING
from plantune.graph.types import TensorType
from plantune.models import resnet


def test_other_threads_call_and_read_modules_while_one_is_traced(randomise: Any) -> None:
    """Also the very module that is traced: its eager forward, and a second extraction."""
    module = randomise(resnet.resnet18(num_classes=3)).eval()
    x = torch.randn(1, 3, 33, 33, dtype=torch.float64)
    type_ = TensorType((1, 3, 33, 33), "float64")
    expected, digest = module(x), extract(module, type_).digest
    before = (nn.Module.__call__, nn.Module.__getattr__)
    stop = threading.Event()

    def call() -> int:
        count = 0
        while not stop.is_set():
            assert torch.equal(module(x), expected)
            assert isinstance(module.fc.weight, nn.Parameter)
            count += 1
        return count

    def extract_often() -> set[str]:
        return {extract(module, type_).digest for _ in range(10)}

    with ThreadPoolExecutor(3) as pool:
        caller = pool.submit(call)
        graphs = [pool.submit(extract_often) for _ in range(2)]
        try:
            assert [graph.result() for graph in graphs] == [{digest}] * 2
        finally:
            stop.set()
        assert caller.result() > 0
    assert (nn.Module.__call__, nn.Module.__getattr__) == before


@pytest.mark.parametrize("fails", [False, True])
def test_one_trace_at_a_time(fails: bool, calls: Any) -> None:
    """Two at once would leave one's hold on nn.Module behind for good."""
    locked = []

    def forward(m: Any, x: Tensor) -> Tensor:
        locked.append(TRACING.locked())
        return x.tolist() if fails else x * 2.0

    with pytest.raises(UnsupportedModule) if fails else nullcontext():
        extract(calls(forward), TensorType((3,)))
    assert locked == [True]
    assert not TRACING.locked()
