"""A kernel family is its file, its header and its tables: removing it changes nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.registry import all_families
from plantune.plans.checked_plan import check_plan
from plantune.plans.database.missing_families import missing_family
from plantune.plans.guess import COMPILED, hand_plan
from plantune.space.search_space import load_search_space


@pytest.mark.parametrize(
    ("arch", "family"), [("sm90", "hopper_conv"), ("sm90", "batch_norm"), ("cpu", "onednn_conv")]
)
def test_the_next_best_is_chosen(monkeypatch, arch, family):
    """Lists of what is liked may go on naming it."""
    dtype = "float32" if arch == "cpu" else "float16"
    module = nn.Sequential(nn.Conv2d(64, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    module.to(getattr(torch, dtype)).train(family == "batch_norm")
    graph = extract(module, TensorType((8, 64, 16, 16), dtype))
    space, before = load_search_space(arch), all_families()

    def made():
        plan = hand_plan(graph, space, network="net", without=COMPILED)
        return plan, {choice.candidate.family for choice in plan.choices}

    old, families = made()
    assert family in families
    monkeypatch.setattr(
        "plantune.kernels.registry.all_families",
        lambda: {name: known for name, known in before.items() if name != family},
    )
    plan, families = made()
    check_plan(plan, graph, space)
    assert family not in families
    assert families <= all_families().keys()
    assert (missing_family(old), missing_family(plan)) == (family, None)
