"""Optimizers as kernels: the numbers that they read, and that they build for every arch."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plantune import LAMB, LossScale
from plantune.space.arch import ARCH_NAMES, load_arch
from plantune.training import device_update
from plantune.training.device_update import DeviceUpdate, build_update, can_update
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
from plantune.training.update import FlatGradients, Rules

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


class FakeLauncher:
    """Notes what it is launched with, by the name of its kernel."""

    launched: list[tuple[str, list[int]]]

    def __init__(self, binary, blocks, threads, *, name):
        self._name = name

    def launch(self, stream, arguments):
        self.launched.append((self._name, [*arguments]))


@pytest.fixture
def launched(monkeypatch):
    fake = type("Fake", (FakeLauncher,), {"launched": []})
    monkeypatch.setattr(device_update, "Launcher", fake)
    monkeypatch.setattr(device_update, "build_update", lambda *_: None)
    return fake.launched


def made(optimizer, rules):
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = FlatGradients(weights, torch.device("cpu"))
    return DeviceUpdate(optimizer, gradients, rules, load_arch("sm90")), gradients


def two_weights():
    return [torch.nn.Parameter(torch.randn(size)) for size in (3000, 5)]


RULED = [
    (Rules(), ["advance", "run"]),
    (Rules(max_norm=1.0), ["measure", "advance", "run"]),
    (Rules(scale=LossScale()), ["measure", "advance", "run"]),
]


@pytest.mark.parametrize(("rules", "wanted"), RULED)
def test_gradients_are_read_on_their_own_only_to_clip_or_scale(launched, rules, wanted):
    update, gradients = made(torch.optim.AdamW(two_weights()), rules)
    gradients.present = [True, True]
    update.follow()
    update.run()
    assert [name for name, _ in launched] == wanted


def test_the_norm_that_nobody_measured_is_what_the_update_saw(launched):
    update, _ = made(torch.optim.SGD(two_weights(), 0.1), Rules())
    squares = update._partials[:, 0]
    assert len(squares) == 3, "two chunks and one"
    squares.copy_(torch.tensor([1.0, 3.0, 5.0]))
    assert float(update.gradient_norm()) == 3


class TestState:
    @pytest.fixture
    def update(self, launched):
        made_of = made(torch.optim.AdamW(two_weights()), Rules())
        made_of[1].present = [True, True]
        made_of[0].follow()
        return made_of[0]

    def test_it_is_made_of_views_of_ours(self, update):
        update._kept[0][torch.float32].fill_(3)
        (first, second) = update._optimizer.state.values()
        assert bool((first["exp_avg"] == 3).all() and (second["exp_avg"] == 3).all())

    def test_what_is_put_in_its_place_is_taken_over(self, update):
        weight, state = next(iter(update._optimizer.state.items()))
        ours = state["exp_avg"]
        state["exp_avg"] = torch.full_like(weight, 2)
        update.follow()
        assert state["exp_avg"] is ours
        assert bool((ours == 2).all())

    def test_so_is_a_state_that_was_loaded(self, update):
        loaded = update._optimizer.state_dict()
        loaded["state"][1]["exp_avg_sq"] = torch.full((5,), 4.0)
        loaded["state"][1]["step"] = torch.tensor(7.0)
        update._optimizer.load_state_dict(loaded)
        update.follow()
        state = [*update._optimizer.state.values()][1]
        assert state["exp_avg_sq"] is update._views[1][1]
        assert bool((update._views[1][1] == 4).all())
        assert update._steps.tolist() == [0, 7]

    def test_one_that_was_forgotten_begins_anew(self, update):
        update._views[0][0].fill_(5)
        update._optimizer.state.clear()
        update.follow()
        assert not update._views[0][0].any()
        assert len(update._optimizer.state) == 2

    def test_a_parameter_that_gets_its_first_gradient(self, launched):
        update, gradients = made(torch.optim.AdamW(two_weights()), Rules())
        for present, count in (([True, False], 1), ([True, True], 2)):
            gradients.present = present
            update.follow()
            assert len(update._optimizer.state) == count

    def test_the_next_call_asks_no_parameter(self, update, monkeypatch):
        monkeypatch.setattr(update, "_hand_out", None)
        update.follow()


class NoRoom(TorchDispatchMode):
    """In a capture memory may be that of what was there before, in each replay again."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "empty" not in str(function), "an allocation"
        assert "zeros" not in str(function), "an allocation"
        return function(*args, **(kwargs or {}))


def test_a_captured_step_reads_gradients_where_they_were_then(launched):
    optimizer = torch.optim.SGD(two_weights(), 0.1)
    update, gradients = made(optimizer, Rules())
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    found = [torch.randn_like(weights[0]), None]
    enqueue = update.for_capture()
    with gradients.left_in_place(), NoRoom():
        gradients.take(0, found)
        settle = enqueue()
    (name, arguments) = launched[-1]
    settle()
    places = settle.args[0]
    assert name == "run"
    assert places.data_ptr() in arguments
    assert places.tolist() == [found[0].data_ptr(), 0]
    update.run()
    assert places.data_ptr() not in launched[-1][1], "op by op they are side by side"
