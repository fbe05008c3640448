"""Optimizers as kernels: the numbers that they read, and that they build for every arch."""

from __future__ import annotations

import pytest
import torch

from plantune import LAMB
from plantune.space.arch import ARCH_NAMES, load_arch
from plantune.training.device_update import build_update, can_update
from plantune.training.rules import (
    CORRECTS,
    DECOUPLED,
    GROUP_NUMBERS,
    LARGEST,
    MAXIMIZE,
    NESTEROV,
    RULES,
    row_of,
    rule_of,
)

CUDA = [name for name in ARCH_NAMES if name != "cpu"]
WEIGHT = [torch.nn.Parameter(torch.ones(2))]
# lr, beta1 or momentum, beta2 or dampening, eps, weight decay, flags
ROWS = [
    (torch.optim.SGD(WEIGHT, 0.1, 0.9, 0.5, 0.2), (0.1, 0.9, 0.5, 0.0, 0.2, 0)),
    (torch.optim.SGD(WEIGHT, 0.1, 0.9, nesterov=True), (0.1, 0.9, 0.0, 0.0, 0.0, NESTEROV)),
    (
        torch.optim.Adam(WEIGHT, 0.1, (0.8, 0.9), 1e-7, amsgrad=True),
        (0.1, 0.8, 0.9, 1e-7, 0.0, LARGEST),
    ),
    (
        torch.optim.AdamW(WEIGHT, torch.tensor(0.5), (0.8, 0.9), 1e-7, 0.3, maximize=True),
        (0.5, 0.8, 0.9, 1e-7, 0.3, DECOUPLED + MAXIMIZE),
    ),
    (LAMB(WEIGHT, 0.1, (0.8, 0.9), 1e-7, 0.3), (0.1, 0.8, 0.9, 1e-7, 0.3, CORRECTS)),
]


@pytest.mark.parametrize(("optimizer", "numbers"), ROWS)
def test_the_numbers_of_a_group(optimizer, numbers):
    row = row_of(rule_of(optimizer), optimizer.param_groups[0])
    assert len(row) == GROUP_NUMBERS
    assert row[: len(numbers)] == pytest.approx(numbers)
    assert not any(row[len(numbers) :])


def test_there_is_room_for_what_an_optimizer_keeps_or_may_keep():
    """A schedule may turn momentum on, a loaded state the largest squares."""
    kept = [
        (torch.optim.SGD(WEIGHT, 0.1), 1),
        (torch.optim.SGD(WEIGHT, 0.1, 0.9), 1),
        (torch.optim.AdamW(WEIGHT), 2),
        (torch.optim.AdamW(WEIGHT, amsgrad=True), 3),
        (LAMB(WEIGHT), 2),
    ]
    for optimizer, places in kept:
        assert rule_of(optimizer).places(optimizer.param_groups) == places


def test_optimizers_with_hooks_or_of_other_classes_take_their_own_step():
    class Mine(torch.optim.AdamW):
        pass

    assert rule_of(Mine(WEIGHT)) is None
    assert rule_of(torch.optim.RMSprop(WEIGHT)) is None
    hooked = torch.optim.AdamW(WEIGHT)
    assert rule_of(hooked) is RULES[torch.optim.AdamW]
    hooked.register_step_pre_hook(lambda *_: None)
    assert rule_of(hooked) is None
    assert not can_update(torch.optim.AdamW(WEIGHT), WEIGHT), "on a CPU"


OPTIMIZERS = (torch.optim.SGD, torch.optim.AdamW, LAMB)
# Each arch with one of them, in turn, and all of them for the one that is measured.
IN_TURNS = [(OPTIMIZERS[at % 3], arch) for at, arch in enumerate(CUDA) if arch != "sm90"]


@pytest.mark.parametrize(
    ("optimizer", "arch"), [*IN_TURNS, *((each, "sm90") for each in OPTIMIZERS)]
)
def test_kernels_build_and_spill_nothing(optimizer, arch):
    binary = build_update(RULES[optimizer], "__half", load_arch(arch))
    wanted = {"measure", "advance", "run"} | ({"trust"} if optimizer is LAMB else set())
    assert binary.usage.keys() == wanted
    assert all(used.spill_bytes == used.stack_bytes == 0 for used in binary.usage.values())
