"""Random numbers that plantune draws for itself, and what a user draws after it."""

from __future__ import annotations

import torch

from plantune.base.generators import numbers_of_its_own

CPU = torch.device("cpu")


def test_no_two_draw_the_same_and_the_users_go_on():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    drawn = []
    for _ in range(3):
        with numbers_of_its_own(CPU):
            drawn.append(float(torch.rand(())))
    assert len({*drawn}) == 3
    assert torch.equal(torch.rand(3), wanted)


def test_any_seed_can_be_gone_on_from():
    torch.manual_seed((1 << 64) - 1)
    with numbers_of_its_own(CPU):
        torch.rand(())
