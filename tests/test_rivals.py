"""Whom a plan met in its race, also for plans from before that was kept."""

from __future__ import annotations

import pytest

from plantune.canonical import Attrs
from plantune.measure.race import Race
from plantune.measure.timing import Interval, Timing
from plantune.measure.ways import baselines_for
from plantune.plan_db.validation import TEXT_LENGTH
from plantune.report.bench_text import verdict
from plantune.rivals import Rivals, ratio_text, runner_text
from plantune.search.judgement import evidence_of

COMPILED = "compile-default"


@pytest.mark.parametrize(
    ("evidence", "compiled", "names"),
    [
        ({"rivals": f"eager,{COMPILED}", "baseline": "eager"}, True, ["eager", COMPILED]),
        ({"rivals": "eager,torchscript", "baseline": "eager"}, False, ["eager", "torchscript"]),
        ({"rivals": ""}, False, []),
        ({"baseline": COMPILED}, True, None),
        ({"baseline": "cuda-graph"}, None, None),
        ({}, None, None),
    ],
)
def test_who_was_met_is_read_off_the_evidence(evidence, compiled, names):
    assert Rivals.of(evidence).to_json() == {"rivals": names, "met_compiled": compiled}


@pytest.mark.parametrize(
    ("evidence", "text"),
    [
        ({"rivals": COMPILED}, "0.500 of x's time"),
        ({"rivals": "x"}, "0.500 of x's time; never raced against torch.compile"),
        ({}, "0.500 of x's time; its rivals are not known, but for the one named"),
    ],
)
def test_a_ratio_is_not_shown_as_one_to_a_compiler_that_was_not_met(evidence, text):
    assert ratio_text({"ratio": 0.5, "baseline": "x", **evidence}) == text


def test_without_a_race_there_is_no_ratio():
    assert ratio_text({"predicted_ms": 1.0}) is None


def race(*names: str) -> Race:
    timings = {name: Timing((1.0, 2.0)) for name in ("plantune", *names)}
    return Race(timings, {}, names[0], Interval(1.0, 1.0, 1.0))


def test_evidence_keeps_all_rivals_of_a_race():
    assert evidence_of(race("eager", COMPILED))["rivals"] == f"eager,{COMPILED}"


def test_the_verdict_says_when_no_compiler_raced():
    assert verdict(race("eager")).endswith("; torch.compile was not in this race")
    assert "torch.compile was" not in verdict(race("eager", COMPILED))


def test_an_earlier_plan_and_its_evidence_stay_readable():
    assert Rivals.of(Attrs(median_ms=2.0, baseline="eager", ratio=0.5)).compiled is None


def test_all_names_together_are_a_value_that_an_import_takes():
    assert len(",".join(baselines_for("sm90"))) < TEXT_LENGTH


@pytest.mark.parametrize(
    ("runner", "evidence", "said"),
    [
        ("program", {"rivals": "eager"}, None),
        ("eager", {"rivals": "eager,cuda-graph"}, "these steps as a whole were not clearly faster"),
        ("eager", {"baseline": "cuda-graph"}, "these steps as a whole were not clearly faster"),
        ("eager", {}, "no plan was raced, so eager runs the network"),
    ],
)
def test_a_plan_that_met_nobody_is_not_said_to_have_lost(
    runner: str, evidence: dict[str, str], said: str | None
) -> None:
    text = runner_text(runner, evidence)
    assert text is None if said is None else text is not None and text.startswith(said)
