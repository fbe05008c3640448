"""A loss may have state of its own, which only its calls change."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from plantune import TrainStep
from plantune.training import captured_step
from plantune.training.own_state import MOST_BYTES, state_of
from plantune.training.replays import Replays

JUDGE = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))


class Centered:
    """As in self-distillation: targets are moved by a running center."""

    def __init__(self):
        self.judge, self.center = nn.BatchNorm1d(5), torch.zeros(5)

    def loss(self, y, target):
        self.center.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return cross_entropy(self.judge(y) - self.center, target)


class Called(Centered):
    __call__ = Centered.loss


class Module(nn.Module):
    """Its tensor is no buffer, and its judge is named in its forward alone."""

    def __init__(self):
        super().__init__()
        self.center = torch.zeros(5)

    def forward(self, y, target):
        self.center.add_(y.detach().mean(0))
        return by_a_global(y - self.center, target)


def by_a_global(y, target):
    return cross_entropy(JUDGE(y), target)


def by_a_variable():
    center = torch.zeros(5)

    def moved(y):
        center.add_(y.detach().mean(0))
        return y - center

    return lambda y, target: cross_entropy(moved(y), target)


def by_a_default():
    def loss(y, target, *, judge=nn.BatchNorm1d(5)):  # noqa: B008 - as many write it
        return cross_entropy(judge(y), target)

    return loss


def by_a_part():
    return partial(lambda judge, y, target: cross_entropy(judge(y), target), nn.BatchNorm1d(5))


LOSSES = {
    "a method": lambda: Centered().loss,
    "an object that is called": Called,
    "a module": Module,
    "a global module": lambda: by_a_global,
    "a variable of a function that it calls": by_a_variable,
    "a default": by_a_default,
    "a part": by_a_part,
}


@pytest.mark.parametrize("name", LOSSES)
def test_runs_before_a_capture_leave_no_trace(name, model, batches, monkeypatch):
    """The graph is not replayed here, so that a call with a capture changes nothing at all."""

    def recorded(device, whole, warm_up):
        warm_up()
        whole()
        return SimpleNamespace(executable=None, graph=SimpleNamespace(replay=lambda: None))

    monkeypatch.setattr(captured_step, "_recorded", recorded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(captured_step.CapturedStep, "replay", lambda self, tensors: self._value)
    loss = LOSSES[name]()
    step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.0))
    step._run = Replays(step._run, torch.device("cpu"))
    step(*batches[0])
    state = state_of((model,), loss)
    before = [tensor.clone() for tensor in state]
    step(*batches[1])
    assert step._run._kinds, "it was captured"
    assert len(state) > len([*model.buffers()])
    assert all(map(torch.equal, state, before))


def test_a_modules_own_tensors_are_found():
    loss = Module()
    found = {id(tensor) for tensor in state_of((), loss)}
    assert found == {id(loss.center), *map(id, JUDGE.buffers())}


def test_data_and_weights_are_no_state():
    large = torch.empty(MOST_BYTES // 4 + 1)
    rows = torch.zeros(1).expand(5)
    weight, sparse = nn.Parameter(torch.zeros(5)), torch.zeros(5).to_sparse()
    assert state_of((), lambda y, t: (large[t] + rows + weight + sparse + y).sum()) == []
