"""Where a rounding decides which way a gradient goes, a plan may take another one than torch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.errors import WrongResult
from plantune.graph.tracing.arguments import Arguments
from plantune.kernels import torch_ops
from plantune.runtime.proof import recheck as recheck_module
from plantune.runtime.proof import roundings
from plantune.runtime.proof.cases import Called, judgeable, rounded_again
from plantune.runtime.proof.distances import Distance, Pooled, widened
from plantune.runtime.proof.recheck import recheck
from plantune.space.search_space import load_search_space

SPACE = load_search_space("cpu")


class Tie(nn.Module):
    """What the ReLU reads is zero but for rounding."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(1)), scale

    def forward(self, x):
        one, other = x * self.weight * self.scale, x * self.scale * self.weight
        return x * self.weight + torch.relu(one - other.detach())


@pytest.fixture(params=[41.0, 53.0])
def pool(request, monkeypatch):
    """In this plan a gradient passes also where the ReLU's input is zero."""

    def write(node, dx):
        return lambda dy, y: torch.mul(dy, y >= 0, out=dx)

    monkeypatch.setitem(torch_ops.WRITERS, "relu_grad", write)
    module = Tie(request.param).train()
    tuned = optimize(module, torch.randn(1, 3), mode="train").pool()
    return tuned.checked, module


def test_a_plan_is_not_blamed_for_what_a_rounding_of_its_input_changes(pool):
    recheck(*pool)


def test_the_framework_runs_again_to_show_it(pool, monkeypatch):
    monkeypatch.setattr(recheck_module, "AGAIN", 0)
    with pytest.raises(WrongResult, match="the gradient of weight is off"):
        recheck(*pool)


def test_what_no_rounding_changes_stays_wrong(monkeypatch):
    def write(node, dx):
        return lambda dy, y: torch.mul(dy, y > 0, out=dx).add_(1e-3)

    monkeypatch.setitem(torch_ops.WRITERS, "relu_grad", write)
    layer = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    tuned = optimize(layer.train(), torch.randn(8, 3), mode="train").pool()
    with pytest.raises(WrongResult, match="the gradient of"):
        recheck(tuned.checked, layer)


def test_statistics_are_those_of_one_pass_however_often_the_framework_runs(monkeypatch):
    """Each of its passes begins with the same running statistics as the plan's."""
    layer = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train()
    tuned = optimize(layer, torch.randn(8, 3), mode="train").pool()
    real, seen = roundings.rounded_again, []

    def noted(network, graph, case, random):
        found = real(network, graph, case, random)
        name = "the new value of 1.running_mean"
        seen.append(float((found[name].double() - case.exact[name]).norm()))
        return found

    monkeypatch.setattr(roundings, "rounded_again", noted)
    with monkeypatch.context() as patch:
        patch.setattr(recheck_module, "_worst_jump", lambda graph, found: lambda what: -1.0)
        patch.setattr(Pooled, "bound", property(lambda self: -1.0))
        patch.setattr(recheck_module, "FAR", math.inf)
        with pytest.raises(WrongResult):
            recheck(tuned.checked, layer)
    assert len(seen) >= recheck_module.AGAIN
    assert max(seen) < 1e-5


def test_of_two_runs_the_frameworks_larger_error_counts():
    assert widened(Distance(3.0, 1.0, 0.5), Distance(9.0, 2.0, 0.5)) == Distance(3.0, 2.0, 0.5)
    one, other = Pooled.of((9.0, 1.0, 1.0), 0.5), Pooled.of((0.0, 4.0, 1.0), 0.5)
    assert widened(one, other) == Pooled.of((9.0, 4.0, 1.0), 0.5)


def test_weights_are_rounded_too_and_come_back():
    layer = nn.Linear(3, 64)
    graph = optimize(layer.eval(), torch.randn(2, 3)).pool().graph
    network = Called(layer, Arguments(tuple(type_ for _, type_ in graph.inputs)))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        zeros = (torch.zeros(2, 3),)
        case = replace(judgeable(network, graph, random), inputs=zeros)
        before = layer.bias.clone()
        made = rounded_again(network, graph, case, random)["output 0"]
    assert torch.equal(layer.bias, before)
    assert not torch.equal(made[0], before)
    torch.testing.assert_close(made[0], before, rtol=2e-7, atol=0)
