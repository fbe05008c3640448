"""What changed between two plans, in every place where it can."""

from __future__ import annotations

from dataclasses import replace

from plantune.base.canonical import Attrs
from plantune.devices.machine import Environment
from plantune.kernels.family import Candidate
from plantune.plans.database.rows import StoredPlan
from plantune.plans.plan import Choice, Plan
from plantune.plans.problem import Problem
from plantune.report.difference import difference, difference_text

HERE = Environment("cpu", "A CPU", "0" * 16, 2, "2.13.0", "0.1.0", "g++", "Linux x86_64")
NCHW, NHWC = (Candidate("framework", Attrs(layout=layout)) for layout in ("nchw", "nhwc"))
CHOICES = (Choice(("a",), NCHW), Choice(("b",), NCHW), Choice(("c",), NCHW))
PROBLEM = Problem("net", "a" * 64, "cpu", 8, "float32", "infer")
PLAN = Plan(PROBLEM, CHOICES, "measured", Attrs(median_ms=2.0))
OF_NINE = replace(PROBLEM, batch=9)
STORED = StoredPlan(1, PLAN, HERE, "complete", "now")


def changed(**fields: object) -> StoredPlan:
    return replace(STORED, plan=replace(PLAN, **fields))  # type: ignore[arg-type]


def test_equal_plans_have_no_difference() -> None:
    found = difference(STORED, STORED)
    assert found["same_steps"] == 3
    assert difference_text(found) == "no difference"


def test_each_step_is_in_one_group() -> None:
    other = changed(choices=(Choice(("a",), NHWC), Choice(("b", "c"), NHWC)))
    data = difference(STORED, other)
    assert data["same_steps"] == 0
    assert data["other_candidates"] == [
        {"nodes": ["a"], "first": "framework layout=nchw", "second": "framework layout=nhwc"}
    ]
    assert [step["nodes"] for step in data["only_first"]] == [["b"], ["c"]]
    assert [step["nodes"] for step in data["only_second"]] == [["b", "c"]]


def test_header_evidence_and_environment_are_compared() -> None:
    there = replace(HERE, threads=4, torch="2.12.0")
    other = replace(
        changed(problem=OF_NINE, evidence=Attrs(median_ms=1.0, ratio=0.5)), environment=there
    )
    data = difference(STORED, other)
    assert data["header"] == {"batch": [8, 9]}
    assert difference(STORED, changed(branches=True))["header"] == {"branches": [False, True]}
    assert data["environment"] == {"threads": [2, 4], "torch": ["2.13.0", "2.12.0"]}
    assert data["evidence"] == {"median_ms": [2.0, 1.0], "ratio": [None, 0.5]}


def test_the_text_names_every_part() -> None:
    there = replace(HERE, threads=4)
    other = replace(
        changed(problem=OF_NINE, choices=(Choice(("a",), NHWC), Choice(("b", "c"), NHWC))),
        environment=there,
    )
    text = difference_text(difference(STORED, other))
    for words in ("batch", "threads", "another candidate", "only in the first", "b +1"):
        assert words in text
