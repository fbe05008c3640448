"""What goes to a worker and comes back: the same value, of the same class, in the same order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from plantune.base.jsonable import from_json, to_json
from plantune.base.outcome import Measured, Outcome, Rejected
from plantune.measure.programs import PassCost
from plantune.measure.racing.race import Detail, Race
from plantune.measure.timing import Effort, Timing
from plantune.measure.worker.work import check_and_time, request
from plantune.plans.verdict import Interval

TIMING = Timing((1.25, 2.5), shared=True)
DETAIL = Detail("live", 1.0, False, False, {"same": TIMING}, {"fresh": TIMING}, None, 2.0)
RACE = Race(
    {"z": TIMING, "a": TIMING},
    {"c": "why"},
    "z",
    Interval(0.5, 0.4, 0.6),
    {"b": 3.0},
    "fresh",
    64,
    {"z": DETAIL},
    (9,),
)
TRAVEL = {
    "timing": (Timing, TIMING),
    "cost": (PassCost, PassCost(TIMING, None, 3)),
    "race": (Race, RACE),
    "race without a ratio": (Race, Race({}, {}, None, None)),
    "rejected": (Outcome, Rejected("build", "why")),
    "measured": (Outcome, Measured(1.0, 0.5, 2.0, 7, 1e-7, 1e-6, deterministic=True)),
    "nothing": (Rejected | None, None),
    "something": (Rejected | None, Rejected("memory", "")),
    "several": (list[Timing | Rejected], [TIMING, Rejected("noisy", "why")]),
    "effort": (Effort, Effort(give_up_above_us=3.5, cut_at=7.0)),
    "numbers": (tuple[int, ...], (0, 1)),
    "names": (Sequence[str], ("a", "b")),
    "by name": (Mapping[str, float], {"b": 1.0, "a": 2.0}),
}


def sent(type_: Any, value: Any) -> Any:
    return from_json(type_, json.loads(json.dumps(to_json(value), sort_keys=True)))


@pytest.mark.parametrize("name", TRAVEL)
def test_it_comes_back_as_it_was(name):
    type_, value = TRAVEL[name]
    found = sent(type_, value)
    assert found == value
    assert type(found) is type(value)


def test_the_order_of_ways_stays():
    assert [*sent(Race, RACE).timings] == ["z", "a"]


@pytest.mark.parametrize("data", [{"type": "Timing"}, {"samples_us": 3}, {"unknown": []}, 3])
def test_what_is_not_a_timing_is_refused(data):
    with pytest.raises((AttributeError, KeyError, TypeError)):
        from_json(Timing, data)


def test_a_request_names_its_work_and_its_arguments(step_of):
    asked = request(check_and_time, *"abcd", seeds=(0, 1))
    message = asked.message(memory_bytes=5)
    assert (message["do"], message["memory_bytes"]) == ("check_and_time", 5)
    assert message["with"] == {
        "step": "a", "candidate": "b", "arch": "c", "effort": "d", "seeds": [0, 1]
    }  # fmt: skip
    assert asked.result(to_json(Rejected("build", "why"))) == Rejected("build", "why")
