"""Counters of batches are counted in one launch, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan
from plantune.runtime.program.program import Program
from plantune.runtime.program.skipped_steps import without_counters
from plantune.space.search_space import load_search_space

CPU = load_search_space("cpu")


class Counting(nn.Module):
    """Two batch norms, of which one normalises twice, and counters that are read."""

    def __init__(self):
        super().__init__()
        self.once, self.twice = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.register_buffer("calls", torch.tensor(7))
        self.register_buffer("threes", torch.tensor([1, 2]))

    def forward(self, x):
        self.threes.add_(3)
        self.calls.add_(1)
        return self.twice(self.twice(self.once(x))) * self.calls


@pytest.fixture
def made():
    module = Counting()
    graph = extract(module, TensorType((4, 3, 5, 5)))
    wanted = [name for name, _ in module.named_parameters()]
    graph = differentiate(graph, wanted)
    return module, graph, framework_plan(graph, CPU, network="counting")


def test_those_that_a_pass_only_adds_to_are_no_steps(made):
    _, graph, plan = made
    fewer, shorter, counters = without_counters(graph, plan)
    check_plan(shorter, fewer, CPU)
    assert counters.steps == {1: ("once.num_batches_tracked",), 3: ("threes",)}
    left = {buffer for buffer, _ in fewer.updates}
    assert {"calls", "twice.num_batches_tracked", "twice.running_mean"} <= left
    assert fewer.backward_from == graph.backward_from - 2


def test_both_together_count_as_the_module(made):
    module, graph, plan = made
    fewer, shorter, counters = without_counters(graph, plan)
    program = Program(check_plan(shorter, fewer, CPU))
    program.refresh({**dict(module.named_parameters()), **dict(module.named_buffers())})
    for _ in range(3):
        program.forward(torch.randn(4, 3, 5, 5))
        counters.count(program.values)
    assert module.once.num_batches_tracked == 3
    assert module.twice.num_batches_tracked == 6
    assert module.calls == 10
    assert module.threes.tolist() == [10, 11]


def test_without_counters_nothing_changes():
    graph = extract(nn.Conv2d(3, 4, 3), TensorType((4, 3, 5, 5)))
    plan = framework_plan(graph, CPU, network="conv")
    assert without_counters(graph, plan)[:2] == (graph, plan)
