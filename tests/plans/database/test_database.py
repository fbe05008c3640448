"""What is kept comes back as it was, under its keys and under no other."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plantune.base.canonical import Attrs
from plantune.base.outcome import STAGES, Measured, Outcome, Rejected
from plantune.devices.machine import Environment
from plantune.errors import NoPlan, ReadOnlyDatabase
from plantune.kernels.family import Candidate
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.plan import Plan

MEASURED = Measured(12.5, 12.0, 13.25, 40, 1e-6, 2e-6, deterministic=False, cache="cold")
MakePlan = Callable[..., Plan]


@pytest.mark.parametrize(
    "outcome",
    [
        MEASURED,
        replace(MEASURED, deterministic=True, error=0.0),
        Measured(1, 1, 1, 1, 0, 0, True),
        *(Rejected(stage, "a reason; with 'quotes'\nand é") for stage in STAGES),
    ],
)
def test_a_trial_comes_back_as_it_was(
    database: PlanDatabase, here: Environment, candidate: Candidate, outcome: Outcome
) -> None:
    database.put_trial("step", candidate, here, outcome)
    assert database.trials("step", here) == {candidate: outcome}


def test_trials_belong_to_their_step_and_exact_environment(
    database: PlanDatabase, here: Environment, candidate: Candidate
) -> None:
    database.put_trial("step", candidate, here, MEASURED)
    assert database.trials("another step", here) == {}
    assert database.trials("step", replace(here, torch="2.14.0")) == {}


def test_candidates_differ_by_the_type_of_a_value(
    database: PlanDatabase, here: Environment
) -> None:
    outcomes = {
        Candidate("family", Attrs(value=value)): Rejected("build", repr(value))
        for value in (1, 1.0, True)
    }
    for candidate, outcome in outcomes.items():
        database.put_trial("step", candidate, here, outcome)
    assert database.trials("step", here) == outcomes


def test_a_later_outcome_replaces_the_earlier_one(
    database: PlanDatabase, here: Environment, candidate: Candidate
) -> None:
    database.put_trial("step", candidate, here, Rejected("noisy", "another process ran"))
    database.put_trial("step", candidate, here, MEASURED)
    assert database.trials("step", here) == {candidate: MEASURED}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_failure_is_stored_as_a_number(
    database: PlanDatabase, here: Environment, candidate: Candidate, value: float
) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        database.put_trial("step", candidate, here, replace(MEASURED, median_us=value))
    assert database.trials("step", here) == {}


def test_a_plan_comes_back_as_it_was(database: PlanDatabase, here: Environment, plan: Plan) -> None:
    id = database.put_plan(plan, here)
    found = database.find_plan(plan.problem, here)
    assert found is not None
    assert (found.plan, found.environment, found.match, found.id) == (plan, here, "exact", id)


def test_what_is_stored_outlives_the_process_that_stored_it(
    path: Path, here: Environment, plan: Plan, candidate: Candidate
) -> None:
    with PlanDatabase.open(path) as database:
        database.put_plan(plan, here)
        database.put_trial("step", candidate, here, MEASURED)
    with PlanDatabase.open(path, read_only=True) as database:
        assert [stored.plan for stored in database.plans()] == [plan]
        assert database.trials("step", here) == {candidate: MEASURED}


def test_the_name_of_the_network_does_not_count(
    database: PlanDatabase, here: Environment, make_plan: MakePlan
) -> None:
    plan = make_plan()
    database.put_plan(plan, here)
    found = database.find_plan(make_plan(network="another").problem, here)
    assert found is not None
    assert found.plan == plan


@pytest.mark.parametrize(
    "other",
    [
        {"graph": "b" * 64},
        {"batch": 9},
        {"dtype": "bfloat16"},
        {"mode": "train"},
    ],
)
def test_a_plan_for_another_problem_is_not_found(
    database: PlanDatabase, here: Environment, make_plan: MakePlan, other: dict[str, object]
) -> None:
    database.put_plan(make_plan(), here)
    assert database.find_plan(make_plan(**other).problem, here) is None


def test_the_newest_plan_is_used_and_earlier_ones_are_kept(
    database: PlanDatabase, here: Environment, make_plan: MakePlan
) -> None:
    earlier, later = make_plan(), make_plan(evidence=Attrs(median_ms=2.0))
    database.put_plan(earlier, here)
    database.put_plan(later, here)
    found = database.find_plan(earlier.problem, here)
    assert found is not None
    assert found.plan == later
    assert [stored.plan for stored in database.plans()] == [later, earlier]


def test_a_partial_plan_is_kept_but_not_found(
    database: PlanDatabase, here: Environment, make_plan: MakePlan
) -> None:
    complete, partial = make_plan(), make_plan(evidence=Attrs())
    database.put_plan(complete, here)
    database.put_plan(partial, here, partial=True)
    found = database.find_plan(complete.problem, here)
    assert found is not None
    assert found.plan == complete
    assert [stored.status for stored in database.plans()] == ["partial", "complete"]


def test_an_exact_match_comes_before_a_newer_compatible_one(
    database: PlanDatabase, here: Environment, make_plan: MakePlan
) -> None:
    problem = make_plan().problem
    elsewhere = replace(here, device="Another CPU")
    mine, theirs = make_plan(), make_plan(evidence=Attrs(median_ms=1.0))
    database.put_plan(theirs, elsewhere)
    found = database.find_plan(problem, here)
    assert found is not None
    assert (found.plan, found.match) == (theirs, "compatible")
    database.put_plan(mine, here)
    database.put_plan(theirs, elsewhere)
    found = database.find_plan(problem, here)
    assert found is not None
    assert (found.plan, found.match) == (mine, "exact")


def test_a_plan_for_another_chip_is_marked_and_comes_last(
    database: PlanDatabase, here: Environment, make_plan: MakePlan
) -> None:
    theirs, problem = make_plan(arch="sm90"), make_plan().problem
    database.put_plan(theirs, replace(here, arch="sm90", device="NVIDIA H200"))
    found = database.find_plan(problem, here)
    assert found is not None
    assert (found.plan.problem.arch, found.match) == ("sm90", "foreign")
    database.put_plan(make_plan(), here)
    found = database.find_plan(problem, here)
    assert found is not None
    assert found.match == "exact"


def test_a_plan_is_removed_by_its_id(database: PlanDatabase, here: Environment, plan: Plan) -> None:
    first, second = database.put_plan(plan, here), database.put_plan(plan, here)
    database.remove_plan(second)
    assert [stored.id for stored in database.plans()] == [first]
    with pytest.raises(NoPlan, match=f"no plan has the id {second}"):
        database.remove_plan(second)


def test_a_database_that_is_open_for_reading_refuses_writes(
    path: Path, here: Environment, plan: Plan
) -> None:
    PlanDatabase.open(path).close()
    with PlanDatabase.open(path, read_only=True) as database:
        with pytest.raises(ReadOnlyDatabase, match="open for reading only"):
            database.put_plan(plan, here)
        assert database.plans() == ()


def test_reading_a_missing_database_finds_nothing_and_makes_no_file(
    path: Path, here: Environment, plan: Plan
) -> None:
    with PlanDatabase.open(path, read_only=True) as database:
        assert database.find_plan(plan.problem, here) is None
    assert not path.exists()


def test_a_database_in_memory_serves_like_a_file(here: Environment, plan: Plan) -> None:
    with PlanDatabase.in_memory() as database:
        database.put_plan(plan, here)
        assert [stored.plan for stored in database.plans()] == [plan]


def test_odd_paths_are_paths(tmp_path: Path, here: Environment, plan: Plan) -> None:
    # What is special in a URI, in SQL or in a shell is none of that here.
    path = tmp_path / "new" / "ä b?mode=memory&x#%41';--" / "plans.db"
    with PlanDatabase.open(path) as database:
        database.put_plan(plan, here)
    assert path.is_file()
    with PlanDatabase.open(path, read_only=True) as database:
        assert [stored.plan for stored in database.plans()] == [plan]


def test_the_sqlite_utils_command_reads_it(
    database: PlanDatabase, path: Path, here: Environment, plan: Plan, candidate: Candidate
) -> None:
    database.put_plan(plan, here)
    database.put_trial("step", candidate, here, Rejected("numerics", "off by 3"))
    query = (
        "select status, median_ms, baseline, baseline_ms, ratio, device, stage, reason "
        "from plans join environments on plans.environment = environments.key "
        "join trials on trials.environment = environments.key"
    )
    command = [sys.executable, "-m", "sqlite_utils", "query", str(path), query]
    result = subprocess.run(command, capture_output=True, check=True, text=True)
    assert json.loads(result.stdout) == [
        {
            "status": "complete",
            "median_ms": 2.5,
            "baseline": "torchscript",
            "baseline_ms": 4.0,
            "ratio": 0.625,
            "device": "A CPU",
            "stage": "numerics",
            "reason": "off by 3",
        }
    ]


def test_normal_use_warns_of_nothing(path: Path, here: Environment, plan: Plan) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with PlanDatabase.open(path) as database:
                database.put_plan(plan, here)
                database.plans()
