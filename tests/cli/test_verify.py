"""verify: wrong numbers are 5, whatever else fails is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plantune.base.outcome import Outcome, Rejected
from plantune.devices.machine import cpu_environment
from plantune.errors import WrongResult
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.plans.database.exports import export_plans
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.proofs import is_proved
from plantune.plans.plan import Plan

from .conftest import FakeWorker, Run, changed, measured, object_of


@pytest.fixture(autouse=True)
def stored(store: Callable[..., int], plan: Plan, worker: FakeWorker) -> int:
    worker.times_ms = {"plantune": 2.0, "eager": 4.0}
    return store(plan)


def test_a_right_plan_is_told_with_its_speed(run: Run) -> None:
    result = run("verify", "--batch", 1, "--json")
    assert result.exit_code == 0
    data = object_of(result)
    assert data["ratio"]["ratio"] == pytest.approx(0.5)
    assert set(data["median_ms"]) == {"plantune", "eager"}
    assert all(row["error"] <= row["bound"] for row in data["steps"])
    shown = run("verify", "--batch", 1).stdout
    first, numbers, interval, *_ = shown.splitlines()
    assert first == "runs as plantune's plan, 2.00 times faster than eager"
    assert interval.startswith("0.500 of eager's time, 95 % interval")
    assert numbers.endswith("steps and of the whole are right")
    assert "checking step 1 of" in result.stderr
    assert "racing the whole network with eager" in result.stderr


def test_equal_steps_are_checked_once(run: Run, plan: Plan) -> None:
    steps = object_of(run("verify", 1, "--json"))["steps"]
    assert 0 < len(steps) < len(plan.choices)


def test_a_wrong_step_is_5(run: Run, worker: FakeWorker) -> None:
    def outcomes(step: object, candidate: object) -> object:
        ops = step.ops  # type: ignore[attr-defined]
        return Rejected("numerics", "7 instead of 8") if ops == ("relu",) else measured(1.0)

    worker.outcomes = outcomes  # type: ignore[assignment]
    result = run("verify", 1, "--json")
    assert result.exit_code == 5
    assert "7 instead of 8" in object_of(result)["error"]["message"]


def test_a_wrong_whole_is_5(run: Run, worker: FakeWorker) -> None:
    worker.failure = WrongResult("plantune gives another output", 1.0, 0.1)
    assert run("verify", 1).exit_code == 5


@pytest.mark.parametrize(("stage", "code"), [("crash", 1), ("build", 1), ("noisy", 0)])
def test_other_failures_are_1_and_noise_is_none(
    run: Run, worker: FakeWorker, stage: str, code: int
) -> None:
    worker.outcomes = lambda step, candidate: Rejected(stage, "a reason")
    result = run("verify", 1)
    assert result.exit_code == code
    assert "a reason" in result.stdout


@pytest.mark.parametrize(
    ("stage", "numbers"), [("noisy", "right"), ("numerics", "wrong"), ("build", "not checked")]
)
def test_each_row_says_whether_its_numbers_were_checked(
    run: Run, worker: FakeWorker, stage: str, numbers: str
) -> None:
    def outcomes(step: Step, candidate: Candidate) -> Outcome:
        return Rejected(stage, "a reason") if step.ops == ("relu",) else measured(1.0)

    worker.outcomes = outcomes
    lines = run("verify", 1).stdout.splitlines()
    rows = [line for line in lines if "a reason" in line]
    assert rows
    assert all(f"  {numbers}  " in row for row in rows)
    assert any("  right  " in line for line in lines if "a reason" not in line)


def test_steps_without_a_time_are_counted(run: Run, worker: FakeWorker) -> None:
    worker.outcomes = lambda step, candidate: Rejected("noisy", "a reason")
    steps = object_of(run("verify", 1, "--json"))["steps"]
    assert {row["numbers"] for row in steps} == {"right"}
    assert f"{len(steps)} steps could not be timed" in run("verify", 1).stdout


def test_a_plan_for_another_chip_is_4(run: Run, store: Callable[..., int], plan: Plan) -> None:
    there = replace(cpu_environment(), arch="sm90", device="H200")
    id = store(changed(plan, arch="sm90"), there)
    result = run("verify", id)
    assert result.exit_code == 4
    assert "expected cpu (" in result.stderr
    assert "got sm90 (H200)" in result.stderr


def test_a_plan_that_does_not_fit_is_4(run: Run, store: Callable[..., int], plan: Plan) -> None:
    id = store(changed(plan, choices=plan.choices[1:]))
    assert run("verify", id).exit_code == 4


def test_a_compatible_plan_says_what_differs(
    run: Run, store: Callable[..., int], plan: Plan
) -> None:
    id = store(plan, replace(cpu_environment(), threads=64))
    result = run("verify", id)
    assert result.exit_code == 0
    assert "threads: 64 there" in result.stdout


@pytest.fixture
def team(stored: int, plan: Plan, tmp_path: Path) -> Path:
    """A file of others with the plan, which says that this machine made it; of our own there is
    none.
    """
    with PlanDatabase.open() as database:
        export_plans(database, tmp_path / "team.db", "cpu")
        database.remove_plan(stored)
    return tmp_path / "team.db"


def test_a_plan_of_a_file_is_kept_as_measured_here(run: Run, team: Path, plan: Plan) -> None:
    """What a file says of this machine nobody saw here, so it is measured and becomes one's own."""
    from plantune.plans.database.stored import find_stored_plan

    result = run("verify", "--batch", 1, "--from", str(team), "--json")
    kept = object_of(result)["measured_plan_id"]
    with PlanDatabase.open() as database:
        (own,) = database.plans()
    assert (own.id, own.environment) == (kept, cpu_environment())
    assert own.plan.choices == plan.choices
    assert own.plan.evidence["median_ms"] == pytest.approx(2.0, rel=0.01)
    found = find_stored_plan(plan.problem, cpu_environment())
    assert (found.plan, found.match, found.whose) == (own.plan, "exact", "own")
    assert is_proved(own.plan, cpu_environment())
    again = object_of(run("verify", "--batch", 1, "--from", str(team), "--json"))
    assert again["measured_plan_id"] is None  # one's own comes first


def test_it_says_whose_the_plan_was(run: Run, team: Path) -> None:
    shown = run("verify", "--batch", 1, "--from", str(team)).stdout
    assert "the team plan was in another file; it is kept as plan 2, which is measured here" in (
        " ".join(shown.split())
    )


def test_a_plan_from_elsewhere_is_kept_as_measured_here(
    run: Run, store: Callable[..., int], plan: Plan
) -> None:
    """It is used without a warning from then on."""
    id = store(plan, replace(cpu_environment(), threads=64))
    result = run("verify", id, "--json")
    kept = object_of(result)["measured_plan_id"]
    told = f"plan {id} was made elsewhere; it is kept as plan {kept + 1}"
    assert told in run("verify", id).stdout
    with PlanDatabase.open() as database:
        newest = database.plans()[0]
    assert (newest.id, newest.environment) == (kept + 1, cpu_environment())
    assert newest.plan.evidence["median_ms"] == pytest.approx(2.0, rel=0.01)
    assert object_of(run("verify", kept, "--json"))["measured_plan_id"] is None
