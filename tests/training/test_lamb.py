"""LAMB: the length of a step is that of the tensor."""

from __future__ import annotations

import pytest
import torch

from plantune import LAMB


def test_it_is_adams_direction_as_long_as_the_tensor():
    weight = torch.nn.Parameter(torch.randn(4, 3))
    other = torch.nn.Parameter(weight.detach().clone())
    optimizer = LAMB([weight], lr=0.1, eps=1e-8)
    adam = torch.optim.Adam([other], lr=1.0)
    for _ in range(3):
        gradient = torch.randn(4, 3)
        before = weight.detach().clone()
        other.data.copy_(before)
        for parameter, by in ((weight, optimizer), (other, adam)):
            parameter.grad = gradient
            by.step()
        direction = before - other.detach()
        wanted = before - 0.1 * before.norm() / direction.norm() * direction
        torch.testing.assert_close(weight.detach(), wanted)


def test_decay_is_part_of_the_direction_and_zeros_move_by_the_rate():
    weight, zero = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(2))
    optimizer = LAMB([weight, zero], lr=0.1, weight_decay=1.0, bias_correction=False)
    weight.grad, zero.grad = torch.zeros(2), torch.ones(2)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2,), 0.9))
    moved = 0.1 * (1 - 0.9) / ((1 - 0.999) ** 0.5 + 1e-6)
    torch.testing.assert_close(zero.detach(), torch.full((2,), -moved))


def test_numbers_without_sense_are_refused():
    with pytest.raises(ValueError, match=r"lr must be .*, got -1"):
        LAMB([torch.nn.Parameter(torch.ones(1))], lr=-1)
