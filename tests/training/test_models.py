"""Which calls of a model more than its plan may see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.training.models import Models


@pytest.fixture
def x():
    return torch.randn(8, 3, 8, 8)


@pytest.fixture
def by_hand(monkeypatch):
    """Without a stored plan a CPU runs eager."""
    from plantune.default_plans import COMPILED, hand_plan

    monkeypatch.setattr(
        "plantune.runtime.choose.guessed_plan",
        lambda *args, **options: hand_plan(*args, **options, without=COMPILED),
    )


def test_those_of_a_plan_are_seen_by_nobody_else(model, x, by_hand):
    models = Models(optimize(model, x, mode="train"))
    models(x)
    assert models.seen() == 0


def test_eager_ones_are_counted(model, x):
    models = Models(optimize(model, x, mode="train", fallback="silent"))
    models(x[:3])
    assert models.seen() == 1


def test_hooks_see_calls(model, x, by_hand):
    tuned = optimize(model, x, mode="train", fallback="silent")
    models = Models(tuned)
    hook = tuned.register_forward_pre_hook(lambda *_: None)
    models(x)
    assert models.seen() == 1
    hook.remove()
    models(x)
    assert models.seen() == 1
    hook = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    models(x)
    hook.remove()
    assert models.seen() > 1


def test_a_module_without_a_plan_sees_its_own(x):
    class Branching(nn.Module):
        def forward(self, x):
            return x if float(x.sum()) > 0 else -x

    models = Models(Branching())
    models(x)
    assert models.seen() == 1
