"""plantune.check: whether a tuned module is right now."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import plantune
from plantune.errors import CannotJudge, WrongResult
from plantune.runtime import check as check_module


@pytest.fixture
def model(named, randomise, images, tuned):
    layers = {"conv": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8), "relu": nn.ReLU()}
    return tuned(randomise(named(**layers)), images, plan="hand")


def test_a_right_one(model, images):
    result = plantune.check(model, images)
    assert 0 < result.error <= result.bound
    assert 0 < result.framework < 1e-5
    assert result.call.how == "planned"
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.error = 0.0


def test_kernels_of_the_other_layout_are_right(monkeypatch):
    """Where eager is exact by luck, its error in the other layout counts."""
    real = check_module._compared

    def lucky(ours, theirs, exact, call):
        found = real(ours, theirs, exact, call)
        lucky.calls += 1
        return dataclasses.replace(found, bound=0.0) if lucky.calls == 1 else found

    lucky.calls = 0
    layer, x = nn.Conv2d(8, 8, 3), torch.randn(2, 8, 6, 6)
    model = plantune.optimize(layer.eval(), x)
    monkeypatch.setattr(check_module, "_compared", lucky)
    result = plantune.check(model, x)
    assert 0 < result.error <= result.bound


def test_weights_that_changed_unseen(model, images):
    plantune.check(model, images)
    model.conv.weight.data.mul_(2)
    with pytest.raises(WrongResult, match=r"off by 0\.\d+.*refresh\(\)") as caught:
        plantune.check(model, images)
    assert caught.value.error > caught.value.bound
    model.refresh()
    plantune.check(model, images)


def test_a_call_without_a_plan(model, images):
    with pytest.warns(plantune.UnplannedCall):
        assert plantune.check(model, images[:1]).call.how == "eager"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(value, model, images):
    images[0, 0, 0, 0] = value
    plantune.check(model, images)


def test_nothing_moves(named, images, tuned):
    module = named(conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8))
    model = tuned(module, images, "train")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plantune.check(model, images)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_module_that_draws_cannot_be_judged(named, images):
    module = named(conv=nn.Conv2d(3, 4, 3), drop=nn.Dropout(0.5))
    module.drop.train()
    with pytest.raises(CannotJudge, match="draws random numbers"):
        plantune.check(plantune.optimize(module, images, fallback="silent"), images)


def test_only_a_module_of_plantunes_is_checked():
    with pytest.raises(TypeError, match="that plantune made, got a Linear"):
        plantune.check(nn.Linear(2, 2), torch.zeros(1, 2))
