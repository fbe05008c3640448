"""What a search says of its budget."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from plantune.cli.search_report import longer_s, tried_text, where_kept
from plantune.plans.workload import Workload
from plantune.search.results import Result

PLAN: Any = None
RESULT = Result(
    PLAN, True, None, 9, 3, candidates=391, exhausted=False, budget_s=60.0, spent_s=61.0
)


def test_what_was_not_reached_is_said() -> None:
    assert tried_text(RESULT, 61.2) == (
        "12 of 391 candidates: 9 measured, 3 rejected, 61 s; for others there was no time: "
        "search again to go on, or --budget 300"
    )
    late = tried_text(replace(RESULT, exhausted=True), 64.0)
    assert late.endswith("64 s, 3 of them spent waiting for another search")
    enough = replace(RESULT, exhausted=True)
    assert tried_text(enough, 61.2) == "12 of 391 candidates: 9 measured, 3 rejected, 61 s"


@pytest.mark.parametrize(("given", "advised"), [(5, 60), (15, 75), (60, 300)])
def test_a_longer_budget_is_advised(given: float, advised: float) -> None:
    assert longer_s(given) == advised


def test_what_stays_without_a_race() -> None:
    short = replace(RESULT, budget_s=5.0)
    assert short.unraced == (
        "5 s were too short to race a plan; the network runs as it is, which is never slower"
    )
    found: Any = object()
    assert "the plan that is used already stays" in str(replace(short, known=found).unraced)
    for other in ({"complete": False}, {"race": found}, {"elsewhere": True}):
        assert replace(short, **other).unraced is None


@pytest.mark.parametrize(
    ("workload", "taker"),
    [
        (Workload("resnet18", 1), "load_model"),
        (Workload("own.py:make", 1, inputs=("1x3",)), "optimize"),
    ],
)
def test_a_plan_that_was_not_stored_names_what_takes_it(workload: Workload, taker: str) -> None:
    keeping: Any = SimpleNamespace(plan_id=None, fault="the disk is full", path=None)
    told = where_kept(workload, RESULT, keeping)
    assert told[0] == "the plan could not be stored: the disk is full"
    assert f"plantune.{taker}(plan=...)" in told[1]
