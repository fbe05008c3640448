"""What becomes of NaN, infinities and huge numbers in Winograd and Karatsuba tiles.

NaN is kept. No finite number is left of an infinity, but it may become NaN: the transforms add and
subtract pixels, and weights. And they overflow earlier than the framework's sums: see Promise 1.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.graph.fusions import fusions_named
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import Preference, compose
from plantune.runtime.program.program import Program

MOST = torch.finfo(torch.float32).max
DRAWS = 8


class Tiled:
    """A convolution, with a ReLU perhaps, in Winograd tiles; of images of 2x2 in Karatsuba's."""

    def __init__(self, space, size, relu):
        layers = [nn.Conv2d(8, 16, 3, padding=1), *([nn.ReLU()] if relu else [])]
        self.module = nn.Sequential(*layers).eval().requires_grad_(False)
        self.x = torch.randn(2, 8, size, size)
        graph = optimize(self.module, self.x).pool().graph
        plan = compose(
            graph,
            space,
            network="tiled",
            fusions=fusions_named("conv_epilogue"),
            preferences=(Preference("winograd", {"layout": "nhwc"}),),
        )
        assert {choice.candidate.family for choice in plan.choices} == {"winograd"}
        self.program = Program(check_plan(plan, graph, space))

    def __call__(self):
        """The tiles' result, the framework's, and the one without overflow."""
        self.program.refresh(dict(self.module.named_parameters()))
        (y,) = self.program.forward(self.x)
        return y, self.module(self.x), copy.deepcopy(self.module).double()(self.x.double())

    def poison(self, tensor, *values):
        """Puts each value into a random element; the tensor's others are drawn anew."""
        tensor.normal_()
        for value in values:
            tensor.view(-1)[torch.randint(tensor.numel(), ())] = value


@pytest.fixture(params=[2, 8], ids=["Karatsuba", "Winograd"])
def size(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["plain", "relu"])
def tiled(request, space, size):
    return Tiled(space, size, request.param)


@pytest.mark.parametrize("count", [1, 20])
def test_a_nan_in_an_image_is_where_the_framework_has_it(tiled, count):
    for _ in range(DRAWS):
        tiled.poison(tiled.x, *[math.nan] * count)
        y, eager, _ = tiled()
        assert torch.equal(y.isnan(), eager.isnan())


@pytest.mark.parametrize("values", [(math.inf,), (-math.inf,), (math.inf, -math.inf) * 10], ids=str)
def test_an_infinity_in_an_image_leaves_nothing_finite(tiled, values):
    for _ in range(DRAWS):
        tiled.poison(tiled.x, *values)
        y, eager, _ = tiled()
        assert not (y.isfinite() & ~eager.isfinite()).any()
        assert not (~y.isnan() & eager.isnan()).any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_a_weight_leaves_nothing_finite(tiled, value):
    for _ in range(DRAWS):
        tiled.poison(tiled.module[0].weight, value)
        y, eager, _ = tiled()
        assert not (y.isfinite() & ~eager.isfinite()).any()
        assert not (~y.isnan() & eager.isnan()).any()


class TestWithdrawn:
    """What Promise 1 says that these tiles do not keep; the day they do, these tests change."""

    def test_an_infinity_may_become_nan(self, space):
        """So that ReLU does not make zero of it, as it does in the framework."""
        tiled = Tiled(space, 8, relu=True)
        tiled.poison(tiled.x, math.inf)
        y, eager, _ = tiled()
        assert eager.isinf().any()
        assert not eager.isnan().any()
        assert y.isnan().any()

    def test_an_infinite_weight_reaches_its_whole_channel(self, space):
        """The framework leaves out the padding, the tiles' factors are sums of all weights."""
        tiled = Tiled(space, 8, relu=False)
        tiled.module[0].weight.normal_()[3, 0, 0, 0] = math.inf
        y, eager, _ = tiled()
        assert eager[:, 3, 0].isfinite().all()
        assert y[:, 3].isnan().all()
        assert y[:, :3].isfinite().all()

    def test_huge_images_overflow_in_the_transform(self, space, size):
        tiled = Tiled(space, size, relu=False)
        tiled.x.fill_(MOST / 3)
        tiled.module[0].weight.fill_(1e-4)
        y, eager, exact = tiled()
        assert eager.isfinite().all()
        assert exact.isfinite().all()
        assert not y.isfinite().all()

    def test_huge_sums_overflow_in_the_transform(self, space, size):
        """Terms that cancel in a sum of the framework's stand in several products."""
        tiled = Tiled(space, size, relu=False)
        tiled.x.normal_().mul_(MOST / 10)
        tiled.module[0].weight.normal_()
        y, eager, exact = tiled()
        sound = eager.isfinite() & (exact.abs() < MOST)
        assert sound.any()
        assert not y[sound].isfinite().all()

    # 72 products of at most 4e34 each: their magnitudes sum to less than a hundredth of MOST.
    @pytest.mark.parametrize("scale", [1.0, 1e10, 4e34])
    def test_within_a_hundredth_of_the_range_nothing_overflows(self, space, size, scale):
        tiled = Tiled(space, size, relu=False)
        tiled.x.uniform_(-1, 1).mul_(scale)
        tiled.module[0].weight.uniform_(-1, 1)
        y, eager, _ = tiled()
        assert y.isfinite().all()
        torch.testing.assert_close(y, eager, rtol=1e-4, atol=1e-5 * scale)
