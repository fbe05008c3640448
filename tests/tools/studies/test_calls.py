"""tools/studies/calls: a small study runs on the CPU, and says what a module has come to hold."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plantune.measure.timing import Timing

TOOL = str(Path(__file__).parents[3] / "tools" / "studies" / "calls.py")


@pytest.fixture
def tool() -> dict[str, Any]:
    return runpy.run_path(TOOL)


def test_a_small_study(tool: dict[str, Any]) -> None:
    (told,) = tool["study"](replace(tool["SMALL"], calls=2, changes=1))
    assert json.loads(json.dumps(told)) == told
    assert set(told["queued"]) == {"same input", "inputs in turns", "frozen"}
    assert told["queued"]["same input"]["ratio"] == 1
    assert all(0 < error < 1e-5 for error in told["errors"])
    grown = told["grown"]
    assert grown.pop("eager_calls") in (0, 2)  # a race of the first calls
    assert grown.pop("calls") == 2
    assert set(grown.values()) == {0}


def test_what_is_new_is_counted(tool: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = iter([{"captures": 1, "held_bytes": 10}, {"captures": 3, "held_bytes": 30}])
    monkeypatch.setitem(tool["grown"].__globals__, "_kept", lambda subject: next(kept))
    subject = SimpleNamespace(live=lambda image: None, images=[])
    found = tool["grown"](subject, replace(tool["SMALL"], changes=0))
    assert found == {"calls": 0, "captures": 2, "held_bytes": 20}


def test_the_latest_of_a_thousand_calls(tool: dict[str, Any]) -> None:
    found = tool["_percentiles"](Timing((*[10.0] * 998, 20.0, 90.0)))
    assert (found["p50_us"], found["p99.9_us"], found["p100_us"]) == (10, 20, 90)
    assert found["p99.9_by_p50"] == 2
