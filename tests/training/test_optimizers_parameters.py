"""Which parameters a training step moves: those of its optimizer that its loss depends on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from plantune import TrainStep, optimize


def test_old_gradients_move_nothing(model, batches):
    """Frozen ones and those that the loss does not read were moved by what `.grad` held."""
    model.append(nn.Identity())
    model[-1].unread = nn.Parameter(torch.ones(2))
    step = TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    held = [model[0].weight.requires_grad_(False), model[-1].unread]
    before = [parameter.detach().clone() for parameter in held]
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    step(*batches[0])
    assert all(map(torch.equal, held, before))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in held)


def test_an_optimizer_of_another_models_is_refused(model, batches):
    """As one of the module that `optimize` was given, which it copies."""
    x, y = batches[0]
    tuned = optimize(model, x, mode="train")
    step = TrainStep(tuned, cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match=r"no parameter of the optimizer.*is a copy"):
        step(x, y)


def test_a_later_loss_may_depend_on_others(model, batches):
    """As with a model of which each call runs another part."""
    x, y = batches[0]

    def loss(made, target, counts=True):
        return cross_entropy(made if counts else made.detach() + free, target)

    free = torch.zeros((), requires_grad=True)
    step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.1))
    step(x, y)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(x, y, False)
    assert all(map(torch.equal, model.parameters(), before))


def test_an_optimizer_that_asks_for_the_loss_itself_is_refused(model):
    with pytest.raises(ValueError, match="LBFGS asks for the loss several times"):
        TrainStep(model, cross_entropy, torch.optim.LBFGS(model.parameters()))


def test_an_optimizer_of_sparse_gradients_is_refused_when_the_step_is_made() -> None:
    """Its own step raised torch's error, of whichever gradient came first."""
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 2))
    with pytest.raises(ValueError, match="SparseAdam takes sparse gradients alone"):
        TrainStep(model, cross_entropy, torch.optim.SparseAdam(model[0].parameters()))
