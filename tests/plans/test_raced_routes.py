"""Whom a plan met in its race, also for plans from before that was kept."""

from __future__ import annotations

import pytest

from plantune.base.canonical import Attrs
from plantune.measure.racing.race import Race
from plantune.measure.racing.routes import framework_routes
from plantune.measure.timing import Timing
from plantune.plans.database.validation import TEXT_LENGTH
from plantune.plans.raced_routes import RacedRoutes
from plantune.plans.verdict import Interval
from plantune.report.bench_text import details
from plantune.search.contenders.judgement import evidence_of

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
    assert RacedRoutes.of(evidence).to_json() == {"rivals": names, "met_compiled": compiled}


def race(*names: str) -> Race:
    timings = {name: Timing((1.0, 2.0)) for name in ("plantune", *names)}
    return Race(timings, {}, names[0], Interval(1.0, 1.0, 1.0))


def test_evidence_keeps_all_routes_of_a_race():
    assert evidence_of(race("eager", COMPILED))["rivals"] == f"eager,{COMPILED}"


def test_a_bench_says_when_no_compiler_raced():
    told = "torch.compile was not in this race"
    assert told in details(race("eager"), "program")
    assert told not in details(race("eager", COMPILED), "program")


def test_an_earlier_plan_and_its_evidence_stay_readable():
    assert RacedRoutes.of(Attrs(median_ms=2.0, baseline="eager", ratio=0.5)).compiled is None


def test_all_names_together_are_a_value_that_an_import_takes():
    assert len(",".join(framework_routes("sm90"))) < TEXT_LENGTH
