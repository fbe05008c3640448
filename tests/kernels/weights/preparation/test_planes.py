"""Weights as planes of bfloat16, whose sum they are."""

from __future__ import annotations

import math

import pytest
import torch

from plantune.kernels.family import Frame
from plantune.kernels.weights.constants import Arrangement, by_pixels
from plantune.kernels.weights.jobs import SPLIT_PLANES

LARGE = torch.finfo(torch.float32).max
ORDERS = {"as it is": by_pixels, "turned": lambda w: by_pixels(w).permute(3, 1, 2, 0)}


@pytest.mark.parametrize("planes", [2, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_planes_add_up_to_the_weight(emulated, order, planes):
    weight = torch.randn(40, 24, 3, 3)
    weight.view(-1)[:4] = torch.tensor([LARGE, -LARGE, 1e-39, 0.0])
    shape = tuple(ORDERS[order](weight).shape)
    values = {"w": weight}
    how = Arrangement(shape, torch.bfloat16, ORDERS[order], planes=planes)
    constant = how.of("w", Frame(values))
    preparation = emulated([constant], values)
    preparation.fill()
    assert preparation.by_torch == (planes != SPLIT_PLANES)
    found = constant.memory.double().sum(0)
    assert constant.memory.shape == (planes, *shape)
    assert constant.memory.isfinite().all()
    lost = (found - ORDERS[order](weight)).abs() / ORDERS[order](weight).abs().clamp(min=1e-30)
    assert lost.max() <= 2.0 ** (1 - 8 * planes)
    by_kernel = constant.memory.clone()
    constant.fill()
    assert torch.equal(constant.memory, by_kernel)


def planes_of(emulated, values):
    constant = Arrangement(tuple(values.shape), torch.bfloat16, planes=3).of(
        "w", Frame({"w": values})
    )
    emulated([constant], {"w": values}).fill()
    by_kernel = constant.memory.clone()
    constant.fill()
    assert torch.equal(constant.memory.nan_to_num(7.0), by_kernel.nan_to_num(7.0))
    return by_kernel.float()


def test_what_is_not_finite_is_in_the_last_plane_alone(emulated):
    first, second, last = planes_of(emulated, torch.tensor([torch.nan, torch.inf, 1.0, -torch.inf]))
    assert first.tolist() == [0.0, 0.0, 1.0, 0.0]
    assert second.tolist() == [0.0] * 4
    assert last[0].isnan()
    assert last[1:].tolist() == [torch.inf, 0.0, -torch.inf]


# With planes that are zero, and such as have the other sign than the number.
NUMBERS = (1.0, -1.0, 1.0 + 2**-8, -1.0 - 2**-8, 1.0 + 3 * 2**-9, 0.1, -1e-30, LARGE)


@pytest.mark.parametrize("other", NUMBERS)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_an_infinity_stays_one_in_a_product(emulated, value, other):
    """The products that kernels make of three planes: in each the numbers of both add up to 2 at
    most.
    """
    x, w = planes_of(emulated, torch.tensor([value, other])).unbind(1)
    places = [(i, j) for i in range(3) for j in range(3 - i)]
    for one, two in ((x, w), (w, x)):
        found = sum(float(one[i]) * float(two[j]) for i, j in places)
        assert found == value * other or (math.isnan(found) and math.isnan(value))
