"""An optimizer that torch can capture is a part of the captured step, and follows every change."""

from __future__ import annotations

import copy
import importlib
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from plantune import LossScale, TrainStep
from plantune.errors import CaptureError
from plantune.space.arch import load_arch
from plantune.training import replays
from plantune.training.capturable_update import (
    MOST_CHANGES,
    CapturableUpdate,
    RecapturedStep,
    can_be_captured,
)
from plantune.training.captured_step import UncapturedStep
from plantune.training.replays import Passes, Replays


@pytest.fixture(autouse=True)
def _capturable_here(monkeypatch):
    """torch captures on GPUs alone, and refuses elsewhere what it could compute."""
    module = importlib.import_module("torch.optim.rmsprop")
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda: ["cpu"])


def rmsprop(module, **settings):
    return torch.optim.RMSprop(module.parameters(), 0.01, capturable=True, **settings)


@pytest.fixture
def made(captures):
    """A training step whose optimizer is captured."""

    def make(optimizer, model, loss=cross_entropy, **settings):
        step = TrainStep(model, loss, optimizer, **settings)
        passes = step._run
        update = CapturableUpdate(optimizer, passes.gradients, step._rules, load_arch("cpu"))
        step._update = update
        passes = Passes(passes.run, passes.gradients, update, passes.modules)
        step._run = Replays(passes, torch.device("cpu"))
        return step

    return make


def test_which_optimizers_can_be(model):
    assert can_be_captured(rmsprop(model))
    assert not can_be_captured(torch.optim.RMSprop(model.parameters()))
    hooked = rmsprop(model)
    hooked.register_step_post_hook(lambda *_: None)
    assert not can_be_captured(hooked)


def test_any_rate_is_followed_without_another_capture(
    made, model, twin, eager, batches, captures, assert_alike
):
    other = twin(model)
    ours, theirs = rmsprop(model, momentum=0.9), rmsprop(other, momentum=0.9)
    mine, their = (
        torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=25, cycle_momentum=False)
        for o in (ours, theirs)
    )
    step = made(ours, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in batches:
            torch.testing.assert_close(step(x, y), eager(other, theirs, x, y))
            mine.step()
            their.step()
            assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert_alike(model, other)
    assert [step.replayed for step in captures.made] == [19]


class TestOtherNumbers:
    def test_one_that_changes_is_captured_anew_and_said_once(
        self, made, model, twin, eager, batches, captures, assert_alike
    ):
        other = twin(model)
        ours, theirs = rmsprop(model), rmsprop(other)
        step = made(ours, model)
        told = []
        for index, (x, y) in enumerate(batches[:9]):
            for optimizer in (ours, theirs):
                optimizer.param_groups[0]["weight_decay"] = index // 3 / 10
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step(x, y)
            told += [str(w.message) for w in caught if w.category is RecapturedStep]
            eager(other, theirs, x, y)
        assert_alike(model, other)
        assert len(captures.made) == 3
        assert [gone.is_gone for gone in captures.made] == [True, True, False]
        assert len(told) == 1
        assert "weight_decay of group 0 changed from 0.0 to 0.1" in told[0]

    def test_what_moves_often_follows_each_replay(
        self, made, model, twin, eager, batches, captures, assert_alike
    ):
        other = twin(model)
        ours, theirs = rmsprop(model, momentum=0.5), rmsprop(other, momentum=0.5)
        step = made(ours, model)
        for index, (x, y) in enumerate(batches):
            for optimizer in (ours, theirs):
                optimizer.param_groups[0]["momentum"] = 0.5 + max(index - 3, 0) / 100
            with pytest.warns(RecapturedStep) if index == 4 else nullcontext():
                step(x, y)
            eager(other, theirs, x, y)
        assert_alike(model, other)
        assert len(captures.made) <= MOST_CHANGES + 2
        assert captures.made[-1].replayed > 5

    def test_state_that_is_loaded_is_taken(
        self, made, model, twin, eager, batches, captures, assert_alike
    ):
        other = twin(model)
        ours, theirs = rmsprop(model), rmsprop(other)
        step = made(ours, model)
        early = copy.deepcopy(ours.state_dict())
        for index, (x, y) in enumerate(batches[:12]):
            step(x, y)
            eager(other, theirs, x, y)
            if index == 2:
                early = copy.deepcopy(ours.state_dict())
            if index == 6:
                ours.load_state_dict(copy.deepcopy(early))
                theirs.load_state_dict(copy.deepcopy(early))
            if index == 8:
                ours.state.clear()
                theirs.state.clear()
        assert_alike(model, other)
        assert [gone.is_gone for gone in captures.made] == [True, True, False]


def test_overflows_are_taken_back(made, model, twin, batches, captures, assert_alike):
    def loss(y, target, factor):
        return cross_entropy(y, target) * factor

    other = twin(model)
    ours, theirs = rmsprop(model, momentum=0.9), rmsprop(other, momentum=0.9)
    scale = LossScale(8.0, growth_interval=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    step = made(ours, model, loss, scale=scale, max_norm=0.5)
    for index, (x, y) in enumerate(batches):
        factor = torch.tensor(float("inf") if index in (0, 5, 9, 10) else 1.0)
        step(x, y, factor)
        assert bool(step.found_inf) == (index in (0, 5, 9, 10))
        theirs.zero_grad()
        scaler.scale(loss(other(x), y, factor)).backward()
        scaler.unscale_(theirs)
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        scaler.step(theirs)
        scaler.update()
        assert scale.state_dict() == scaler.state_dict()
    assert_alike(model, other)
    assert {int(state["step"]) for state in ours.state.values()} == {16}
    assert captures.made[0].replayed > 10


def test_one_that_cannot_be_captured_after_all_follows_each_replay(
    made, model, eager, batches, captures, monkeypatch, assert_alike
):
    def refuse(run, update, given, modules, device, *, seen):
        if update is not None:
            raise CaptureError("operation not permitted when stream is capturing")
        return captures(run, update, given, modules, device, seen=seen)

    monkeypatch.setattr(replays, "CapturedStep", refuse)
    other = copy.deepcopy(model)
    ours, theirs = rmsprop(model), rmsprop(other)
    step = made(ours, model)
    for index, (x, y) in enumerate(batches[:5]):
        said = pytest.warns(UncapturedStep, match="the step of RMSprop cannot be captured")
        with said if index == 1 else nullcontext():
            value = step(x, y)
        torch.testing.assert_close(value, eager(other, theirs, x, y))
    assert_alike(model, other)
    assert captures.made[0].replayed == 4
