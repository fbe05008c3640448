"""When a plan's results are as good as the framework's: outputs draw by draw, gradients pooled."""

from __future__ import annotations

import math

import pytest
import torch

from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.runtime.proof.distances import GRADIENT, Pooled, distances, joined

SCALAR, VECTOR = f"{GRADIENT}scale", f"{GRADIENT}weight"


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight * self.scale


@pytest.fixture
def graph():
    return differentiate(extract(Scaled().train(), TensorType((2, 4))))


def results(**off):
    """Results that are off by so much from ones."""
    sizes = {"output 0": 8, SCALAR: 1, VECTOR: 4}
    names = {"y": "output 0", "scalar": SCALAR, "vector": VECTOR}
    given = {names[short]: value for short, value in off.items()}
    return {name: torch.ones(n) + given.get(name, 0.0) for name, n in sizes.items()}


def found(graph, ours, theirs):
    return dict(distances(graph, results(**ours), results(**theirs), results()))


def is_right(distance):
    return distance.ours <= distance.bound


def test_a_scalar_on_which_the_framework_is_lucky_is_right_over_several_draws(graph):
    """One draw of a scalar's gradient is luck: seen 2.9e-2 against a bound of 2.7e-3, where the
    pooled error was 1.86 times torch's.
    """
    draws = [(2.9e-2, 1e-3), (1e-2, 2e-2), (1e-2, 1e-2)]
    each = [found(graph, {"scalar": a}, {"scalar": b}) for a, b in draws]
    assert not is_right(each[0][SCALAR])
    pooled = each[0]
    for other in each[1:]:
        pooled = joined(pooled, other)
    assert is_right(pooled[SCALAR])
    wanted = math.dist(*zip(*((a, 0.0) for a, _ in draws), strict=True)) / math.sqrt(3)
    assert pooled[SCALAR].ours == pytest.approx(wanted, rel=1e-3)


def test_each_parameter_is_judged_for_itself(graph):
    """The framework's bad gradient of one excuses no other's."""
    both = found(graph, {"vector": 1e-2}, {"scalar": 1e-2, "vector": 1e-5})
    assert is_right(both[SCALAR])
    assert not is_right(both[VECTOR])


def test_a_bias_is_wrong_however_often_it_is_drawn(graph):
    once = found(graph, {"scalar": 3e-3}, {"scalar": 1e-3})
    pooled = once
    for _ in range(50):
        pooled = joined(pooled, once)
    assert not is_right(pooled[SCALAR])


def test_outputs_are_judged_by_their_worst_draw(graph):
    good, bad = (found(graph, {"y": off}, {"y": 1e-6}) for off in (1e-6, 1e-3))
    assert is_right(good["output 0"])
    assert not is_right(joined(good, bad)["output 0"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_wrong(graph, value):
    pooled = found(graph, {"scalar": value}, {})
    for _ in range(5):
        pooled = joined(pooled, found(graph, {}, {"scalar": 1e-2}))
    assert not is_right(pooled[SCALAR])


def test_a_gradient_that_is_zero_must_be_zero():
    assert Pooled.of((0.0, 0.0, 0.0), 1e-6).ours == 0
    assert Pooled.of((1e-9, 0.0, 0.0), 1e-6).ours == math.inf
