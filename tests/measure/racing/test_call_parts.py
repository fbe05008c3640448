"""Phases of a call by the marks between them."""

from __future__ import annotations

from plantune.devices.device import CPU
from plantune.measure.racing.call_parts import START, _between, parts_us


def test_phases_lie_between_marks_and_those_of_micro_batches_add_up():
    marks = [(START, 1.0), ("forward", 3.0), ("backward", 7.0), ("forward", 8.0), ("step", 8.5)]
    assert _between(marks) == {"forward": 3.0, "backward": 4.0, "step": 0.5}


def test_a_call_is_marked_as_often_as_it_is_timed():
    calls = []

    def call(mark):
        mark(START)
        calls.append(mark)
        mark("forward")

    found = parts_us(call, CPU)
    assert list(found) == ["forward"]
    assert found["forward"] > 0
    assert len(calls) > 2
