"""Which calls of a training step are captured, and when that is done again."""

from __future__ import annotations

import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from plantune import TrainStep
from plantune.devices.cuda.flags import flags
from plantune.training.captured_step import UncapturedStep, _line_of
from plantune.training.replays import MOST_KINDS, Replays


@contextmanager
def rounded_products():
    """What torch says of exact ones depends on whether they were ever asked for."""
    with flags(torch.backends.cuda.matmul, fp32_precision="tf32"):
        yield


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "products of float32": rounded_products,
    "deterministic algorithms": deterministic,
}


def move_a_parameter(step):
    first, second = step.optimizer.param_groups
    first["params"].append(second["params"].pop(0))


CHANGES = {
    "a hook of the optimizer": lambda step: step.optimizer.register_step_pre_hook(print),
    "a hook of a parameter": lambda step: step.model[0].weight.register_hook(torch.neg),
    "another loss": lambda step: setattr(step, "loss", nn.functional.multi_margin_loss),
    "a parameter in another group": move_a_parameter,
}


@pytest.fixture
def step(model, captures):
    first, *others = model.parameters()
    groups = [{"params": [first]}, {"params": others}]
    made = TrainStep(model, cross_entropy, torch.optim.AdamW(groups, 0.01))
    made._run = Replays(made._run, torch.device("cpu"))
    return made


def test_replays_compute_what_eager_does(step, model, twin, eager, batches, captures, assert_alike):
    other = twin(model)
    theirs = torch.optim.AdamW(other.parameters(), 0.01)
    for x, y in batches[:6]:
        torch.testing.assert_close(step(x, y), eager(other, theirs, x, y))
    assert_alike(model, other)
    assert [made.replayed for made in captures.made] == [5]


def test_each_kind_of_call_is_one_of_its_own(step, batches, captures):
    x, y = batches[0]
    for size in (8, 5, 8, 5, 8, 5):
        step(x[:size], y[:size])
    assert [made.replayed for made in captures.made] == [2, 2]


@pytest.mark.filterwarnings("ignore:.*not known to be deterministic")
@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_of_the_callers_is_one_of_its_own(step, batches, captures, name):
    """A captured step keeps what it was captured with."""
    around = (nullcontext, SETTINGS[name])
    for turn, (x, y) in enumerate(batches[:12]):
        with around[turn // 3 % 2]():
            step(x, y)
    assert [made.replayed for made in captures.made] == [5, 5]


def test_only_so_many_are_kept(step, batches, captures):
    x, y = batches[0]
    for size in range(8, 8 - MOST_KINDS - 1, -1):
        step(x[:size], y[:size])
        step(x[:size], y[:size])
    assert [made.is_gone for made in captures.made] == [True, *[False] * MOST_KINDS]


def test_those_that_were_used_last_are_kept(step, batches, captures):
    """One that comes between all others is captured once."""
    x, y = batches[0]
    step(x, y)
    for size in (7, 6, 5, 4, 3, 2):
        step(x[:size], y[:size])
        step(x, y)
    assert [(made.replayed, made.is_gone) for made in captures.made] == [(6, False)]


def advised(target, x, factor, hint=1.0):
    return cross_entropy(target, x) * factor * hint


class TestWhatIsNeverCaptured:
    """It is said once, in the line of the caller, by the value that differs."""

    def said(self, step, calls, *, lines=1):
        """What is said in so many calls, by the last of which all was said."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for call in calls:
                step(*call)
        found = [each for each in caught if each.category is UncapturedStep]
        assert {each.filename for each in found} <= {__file__}
        assert len(found) == lines
        return str(found[0].message) if found else ""

    def test_more_shapes_in_turn_than_are_kept(self, step, batches, captures):
        x, y = batches[0]
        text = self.said(step, [(x[:size], y[:size]) for size in (8, 7, 6, 5, 4) * 12])
        assert captures.made == []
        assert "5 kinds of calls or more come in turn, and the last 4 are kept" in text
        assert "differ in input 1: " in text
        assert "a tensor (5, 3, 8, 8) float32" in text
        assert "pad batches" in text

    def test_a_number_that_changes(self, step, batches, captures):
        x, y = batches[0]
        step.loss = advised
        step(x, y, 0.5)
        step._run = Replays(step._run, torch.device("cpu"))
        text = self.said(step, [(x, y, 0.5 + at / 1000) for at in range(60)])
        assert captures.made == []
        assert "differ in target 2: " in text
        assert "give it as a tensor" in text

    def test_an_attribute_that_changes(self, step, model, batches, captures):
        def calls():
            for at in range(60):
                model[1].momentum = 0.1 + at / 1000
                yield batches[0]

        text = self.said(step, calls())
        assert captures.made == []
        assert "Small.1.momentum (0.1" in text
        assert "changes between calls" in text

    def test_a_loss_that_is_made_anew(self, model, batches, captures, monkeypatch):
        made = TrainStep._made
        monkeypatch.setattr(
            TrainStep,
            "_made",
            lambda step, found: Replays(made(step, found), torch.device("cpu"), turns=step._turns),
        )
        step = TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.01))

        def calls():
            for at in range(60):
                step.loss = lambda made, y, factor=at: cross_entropy(made, y) * factor
                yield batches[0]

        assert "it has another loss in each call: make it once" in self.said(step, calls())
        assert captures.made == []

    def test_a_setting_that_changes(self, step, batches, captures, monkeypatch):
        numbers = iter(range(1000))
        passes = step._run.passes
        monkeypatch.setattr(
            step,
            "_run",
            Replays(replace(passes, settings=lambda: (next(numbers), (), False)), step._device),
        )
        text = self.said(step, [batches[0]] * 30)
        assert "differ in autocast: " in text

    def test_not_where_few_calls_are(self, step, batches, captures):
        x, y = batches[0]
        sizes = [size for rest in range(1, 7) for size in (*(8,) * 10, rest)]
        self.said(step, [(x[:size], y[:size]) for size in sizes], lines=0)
        assert captures.made[0].replayed > 50


class TestCapturedAgain:
    def test_where_another_hook_took_the_place_of_one(self, step, model, batches, captures):
        """As many as before."""
        handle = model[0].weight.register_hook(torch.neg)
        step(*batches[0])
        step._run = Replays(step._run, torch.device("cpu"))
        for x, y in batches[:3]:
            step(x, y)
        handle.remove()
        model[0].weight.register_hook(torch.abs)
        step(*batches[3])
        assert [(made.replayed, made.is_gone) for made in captures.made] == [(2, True)]

    def test_where_the_model_changed(self, step, model, batches, captures):
        for x, y in batches[:3]:
            step(x, y)
        model[1].momentum = 0.5
        for x, y in batches[:3]:
            step(x, y)
        assert [(made.replayed, made.is_gone) for made in captures.made] == [(2, True), (2, False)]

    def test_where_a_weight_moved(self, step, model, batches, captures):
        for x, y in batches[:2]:
            step(x, y)
        model[-1].weight.data = model[-1].weight.data.clone()
        before = model[-1].weight.detach().clone()
        step(*batches[2])
        assert captures.made[0].is_gone
        assert not torch.equal(model[-1].weight, before)

    @pytest.mark.parametrize("name", CHANGES)
    def test_where_it_is_trained_otherwise(self, step, batches, captures, name):
        for x, y in batches[:3]:
            step(x, y)
        CHANGES[name](step)
        step(*batches[3])
        assert [(made.replayed, made.is_gone) for made in captures.made] == [(2, True)]

    def test_not_after_an_evaluation_between(self, step, model, batches, captures):
        for x, y in batches[:5]:
            step(x, y)
            model.eval()
            model(x)
            model.train()
        assert len(captures.made) == 1

    def test_after_refresh(self, step, batches, captures):
        for x, y in batches[:3]:
            step(x, y)
        step.refresh()
        for x, y in batches[:3]:
            step(x, y)
        assert [made.is_gone for made in captures.made] == [True, False]


def test_what_cannot_be_captured_is_said_once_and_right(
    step, model, twin, eager, batches, captures, assert_alike
):
    captures.failure = "operation not permitted when stream is capturing, at train.py:7"
    other = twin(model)
    theirs = torch.optim.AdamW(other.parameters(), 0.01)
    step(*batches[0])
    with pytest.warns(UncapturedStep, match=r"at train\.py:7"):
        step(*batches[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*batches[2])
    for x, y in batches[:3]:
        eager(other, theirs, x, y)
    assert_alike(model, other)


def test_the_line_that_a_capture_broke_at_is_the_users():
    def loss():
        return nn.functional.linear(torch.ones(2), torch.ones(3))

    with pytest.raises(RuntimeError) as caught:
        loss()
    line = loss.__code__.co_firstlineno + 1
    assert _line_of(caught.value) == f", at {__file__}:{line}"
