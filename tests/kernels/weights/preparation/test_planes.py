"""Weights as planes of bfloat16, whose sum they are."""

from __future__ import annotations

import pytest
import torch

from plantune.kernels.family import Frame
from plantune.kernels.weights.constants import Arrangement, by_pixels

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
    assert preparation.by_torch == 0
    found = constant.memory.double().sum(0)
    assert constant.memory.shape == (planes, *shape)
    assert constant.memory.isfinite().all()
    lost = (found - ORDERS[order](weight)).abs() / ORDERS[order](weight).abs().clamp(min=1e-30)
    assert lost.max() <= 2.0 ** (1 - 8 * planes)
    by_kernel = constant.memory.clone()
    constant.fill()
    assert torch.equal(constant.memory, by_kernel)


def test_planes_of_what_is_no_number_are_none(emulated):
    values = {"w": torch.tensor([[torch.nan, torch.inf, 1.0, -torch.inf]])}
    constant = Arrangement((4,), torch.bfloat16, planes=3).of("w", Frame(values))
    emulated([constant], values).fill()
    assert constant.memory.float().sum(0).isfinite().tolist() == [False, False, True, False]
