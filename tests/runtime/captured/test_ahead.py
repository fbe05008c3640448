"""A pass starts before the host looks at what may have changed, and counts if nothing has."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from plantune.runtime import pool
from plantune.runtime.captured import CapturedProgram
from plantune.runtime.direct import DIRECT_AFTER
from plantune.runtime.form import Form
from plantune.runtime.live_state import HeldTensors, LiveState
from plantune.runtime.module import UnplannedCall

from .conftest import expected, suppressed


def test_a_call_is_one_pass(calm, x, launches, close):
    for _ in range(3):
        x.normal_()
        close(calm(x), expected(calm.reference, x))
    assert len(launches) == 3


def test_it_is_started_before_anything_is_looked_at(calm, x, launches, monkeypatch):
    seen = []
    changed = Form.changed
    monkeypatch.setattr(
        Form,
        "changed",
        lambda self, *known: seen.append(len(launches)) or changed(self, *known),
    )
    calm(x)
    assert seen == [1]


@torch.no_grad()
def test_with_other_weights_it_is_run_again(calm, x, launches, close):
    calm.get_submodule("0").weight.mul_(2)
    close(calm(x), expected(calm.reference, x))
    assert len(launches) == 2


@torch.no_grad()
def test_weights_that_change_all_the_time_cost_no_second_pass(calm, x, launches, close):
    for _ in range(4):
        calm.get_submodule("0").weight.mul_(1.1)
        close(calm(x), expected(calm.reference, x))
    assert len(launches) == 5


@torch.no_grad()
def test_an_interrupt_in_the_look_loses_no_change(calm, x, close, monkeypatch):
    """The look has noted the change by then."""
    changed = LiveState.changed

    def interrupted(self):
        monkeypatch.setattr(LiveState, "changed", changed)
        assert changed(self)
        raise KeyboardInterrupt

    calm.get_submodule("0").weight.mul_(2)
    monkeypatch.setattr(LiveState, "changed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calm(x)
    close(calm(x), expected(calm.reference, x))


def test_another_layer_is_run(calm, x, close):
    calm.get_submodule("0").stride = (2, 2)
    close(calm(x), expected(calm.reference, x))
    assert calm(x).shape == (4, 8, 3, 3)


def test_replaced_weights_are_used(calm, x, close):
    calm.get_submodule("0").weight = nn.Parameter(torch.randn(8, 3, 3, 3))
    close(calm(x), expected(calm.reference, x))


def test_hooks_stop_it(calm, x, close):
    calm.get_submodule("2").register_forward_hook(lambda module, inputs, y: y + 1)
    with pytest.warns(UnplannedCall, match="hooks"):
        close(calm(x), calm.reference(x))


def test_determinism_that_is_asked_for_stops_it(calm, x, close):
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.warns(UnplannedCall, match="deterministic"):
            close(calm(x), calm.reference(x))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_pass_that_does_not_count_holds_no_memory(calm, x, monkeypatch):
    held, launch, eagerly = [], CapturedProgram.launch, calm.reference.forward

    def launch_and_note(self, *inputs):
        started = launch(self, *inputs)
        held.extend(map(weakref.ref, started.outputs))
        return started

    def alive_in_forward(x):
        held[:] = [output() for output in held]
        return eagerly(x)

    monkeypatch.setattr(CapturedProgram, "launch", launch_and_note)
    monkeypatch.setattr(calm.reference, "forward", alive_in_forward)
    calm.get_submodule("2").register_forward_hook(lambda module, inputs, y: y + 1)
    with suppressed():
        calm(x)
    assert held == [None]


def test_what_the_framework_runs_is_not_started_again(calm, x, launches):
    calm.get_submodule("2").register_forward_hook(lambda module, inputs, y: y + 1)
    with pytest.warns(UnplannedCall, match="hooks"):
        calm(x)
    calm(x)
    assert len(launches) == 1


@pytest.mark.parametrize("first", [False, True])
def test_no_graph_is_captured_under_autocast(calm, x, captures, first):
    """It would be replayed without it, too: whichever call is the one that repeats enough."""
    under = []
    captures.append = lambda run: under.append(torch.is_autocast_enabled("cpu"))
    for call in range(3 * DIRECT_AFTER):
        with torch.autocast("cpu", enabled=(call % 2 == 0) is first), suppressed():
            calm(x)
    assert under
    assert not any(under)


def test_transforms_of_functions_run_in_the_framework(calm, x, close):
    calm.get_submodule("2").register_forward_hook(lambda module, inputs, y: y + 1)
    with pytest.warns(UnplannedCall, match="hooks"):
        y = torch.func.vmap(calm)(torch.stack([x, x + 1]))
    close(y[1], calm.reference(x + 1))


def test_where_weights_lie_is_looked_at_once_a_call(calm, x, monkeypatch):
    looks, in_place = [], HeldTensors.in_place
    monkeypatch.setattr(HeldTensors, "in_place", lambda self: looks.append(self) or in_place(self))
    for _ in range(3):
        calm(x)
    assert len(looks) == 3


def test_what_is_known_of_other_tensors_does_not_count(calm, x, close):
    """Another thread's call may end with a pool of an earlier form."""
    earlier = calm._last_pool
    calm.reference[0] = nn.Conv2d(3, 8, 3)
    calm(x)
    calm._last_pool = earlier
    weight = calm.get_submodule("0").weight
    weight.data = weight.data.clone() * 3
    close(calm(x), expected(calm.reference, x))


def test_a_call_that_ends_late_brings_no_earlier_pool_back(calm, x, monkeypatch):
    earlier, forward = calm._last_pool, pool.Instance.forward

    def change_meanwhile(self, *inputs):
        monkeypatch.setattr(pool.Instance, "forward", forward)
        calm.reference[0] = nn.Conv2d(3, 8, 3)
        calm(x)
        return forward(self, *inputs)

    calm._last_pool = None
    monkeypatch.setattr(pool.Instance, "forward", change_meanwhile)
    calm(x)
    assert calm._last_pool is not earlier


def test_where_another_thread_saw_weights_move_nothing_starts(calm, x, launches, close):
    """Its look says where they lie now; graphs of this instance read where they lay."""
    weight = calm.get_submodule("0").weight
    weight.data = weight.data.clone() * 3
    calm._last_form.tensors.look()
    close(calm(x), expected(calm.reference, x))
    assert len(launches) == 1


@torch.no_grad()
def test_memory_that_a_storage_lost_is_not_read(calm, x, launches, close):
    weight = calm.get_submodule("0").weight
    kept = weight.clone()
    size = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    others = [torch.empty(size, dtype=torch.uint8) for _ in range(8)]  # one takes that memory
    weight.untyped_storage().resize_(size)
    weight.copy_(kept)
    close(calm(x), expected(calm.reference, x))
    assert len(others) == 8
    assert len(launches) == 1


def test_a_plan_that_runs_eagerly_starts_nothing(calm, x, launches):
    calm.train()
    object.__setattr__(calm.pool().plan, "runner", "eager")
    for _ in range(3):
        calm(x)
    assert len(launches) <= 1


def test_another_batch_is_not_started(calm, x, launches):
    with pytest.warns(UnplannedCall):
        calm(x[:2])
    assert not launches


def test_a_refresh_by_hand_counts(calm, x, launches, close):
    with torch.no_grad():
        calm.get_submodule("0").weight.data.view(-1)[1] += 1
    calm.refresh()
    close(calm(x), expected(calm.reference, x))
    assert len(launches) == 2


def test_every_instance_goes_back(calm, x, launches):
    for scale in (1.0, 2.0):
        with torch.no_grad():
            calm.get_submodule("0").weight.mul_(scale)
        calm(x)
    assert len(calm.pool()._idle) == 1
