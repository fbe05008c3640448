"""Losses that take gradients of gradients: the model runs itself, as no plan has these."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from plantune import TrainStep, UnplannedCall, optimize
from plantune.plans.guess import COMPILED, hand_plan


@pytest.fixture(autouse=True)
def _from_plans(monkeypatch):
    """On a CPU the guess may be to run eagerly."""
    monkeypatch.setattr(
        "plantune.runtime.calls.choose.guessed_plan",
        lambda *args, **options: hand_plan(*args, **options, without=COMPILED),
    )


def of_images(y, x, target, model):
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return cross_entropy(y, target) + gradient.square().mean()


def of_parameters(y, x, target, model):
    value = cross_entropy(y, target)
    found = torch.autograd.grad(value, [*model.parameters()], create_graph=True)
    return value + 0.1 * sum(gradient.square().sum() for gradient in found)


PENALTIES = {"images": of_images, "parameters": of_parameters}


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_for_gradients(model, twin, batches, assert_alike, name, tuned):
    """Statistics and random numbers move once in the first step, too."""
    model.insert(3, nn.Dropout(0.3))
    other, given, penalty = twin(model), model, PENALTIES[name]
    if tuned:
        given = optimize(model, batches[0][0], mode="train", share=True)
    step = TrainStep(
        given,
        lambda y, x, target: penalty(y, x, target, model),
        torch.optim.Adam(model.parameters(), 1e-2),
    )
    theirs = torch.optim.Adam(other.parameters(), 1e-2)
    for at, (x, target) in enumerate(batches[:4]):
        x.requires_grad_()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", UnplannedCall)
            torch.manual_seed(at)
            value = step(x, x, target)
        assert ["double backward" in str(each.message) for each in said] == [True] * (at == 0)
        torch.manual_seed(at)
        wanted = penalty(other(x), x, target, other)
        theirs.zero_grad()
        wanted.backward()
        theirs.step()
        torch.testing.assert_close(value, wanted.detach())
    assert_alike(model, other)


def test_a_penalty_that_comes_later(model, twin, batches, assert_alike):
    """As one in every so many steps does: that step moves statistics and random numbers once."""
    model.insert(3, nn.Dropout(0.3))
    other, now = twin(model), [False]

    def loss(y, x, target):
        return of_images(y, x, target, None) if now[0] else cross_entropy(y, target)

    step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.1))
    theirs = torch.optim.SGD(other.parameters(), 0.1)
    for at, (x, target) in enumerate(batches[:4]):
        now[0] = at == 2
        x.requires_grad_()
        torch.manual_seed(at)
        if now[0]:
            with pytest.warns(UnplannedCall, match="double backward") as said:
                value = step(x, x, target)
            assert said[0].filename == __file__
        else:
            value = step(x, x, target)
        torch.manual_seed(at)
        theirs.zero_grad()
        wanted = loss(other(x), x, target)
        wanted.backward()
        theirs.step()
        torch.testing.assert_close(value, wanted.detach())
        assert_alike(model, other)


def test_torchs_own_scaler_is_refused(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match=r"LossScale\(\)\.load_state_dict\(.*, got a GradScaler"):
        TrainStep(model, cross_entropy, optimizer, scale=torch.amp.GradScaler("cpu"))
