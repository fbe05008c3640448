"""The times of a plan's steps come with the plan, to another database and another machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from plantune.base.outcome import Outcome
from plantune.errors import InvalidPlan
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.measure.timing import Timing
from plantune.plans.database.exports import export_plans, import_plans
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.plan import Plan
from plantune.plans.step_times import StepTimes

from .conftest import FakeWorker, Run, measured, object_of, timing


@pytest.fixture(autouse=True)
def loaded() -> None:
    """The search's files, which take the real worker before `worker` puts the fake in its place."""
    import plantune.search.search  # noqa: F401


def by_layout(step: Step, candidate: Candidate) -> Outcome:
    return measured(10.0 if candidate.config.get("layout") == "nhwc" else 12.5)


def in_their_order(
    worker: FakeWorker, graph: object, plans: Sequence[Plan], *_: object, **__: object
) -> list[Timing]:
    """The first plan, which is the best by its steps, is the fastest as a whole too."""
    return [timing(2.0 + number) for number in range(len(plans))]


def test_explain_shows_them_of_an_imported_plan(
    loaded: None, run: Run, worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    worker.outcomes = by_layout
    monkeypatch.setattr(FakeWorker, "time_programs", in_their_order)
    found, exported, there = (tmp_path / name for name in ("found.db", "cpu.db", "there.db"))
    long = ("--budget", 600)  # a busy machine needs more than a minute
    assert run("search", "--batch", 1, *long, "--no-shipped", "--db", found).exit_code == 0
    assert run("export", exported, "--db", found).exit_code == 0
    assert run("import", exported, "--db", there).exit_code == 0
    here = object_of(run("explain", 1, "--db", found, "--json"))["steps"]
    told = object_of(run("explain", 1, "--db", there, "--json"))["steps"]
    assert len(told) == len(here) > 10
    for step, before in zip(told, here, strict=True):
        assert step["measured"] == []
        names = ("step", "chosen", "chosen_us", "margin", "roofline_us", "runner_up")
        assert [step[name] for name in names] == [before[name] for name in names]
        assert step["chosen_us"] in (10.0, 12.5)
        assert step["roofline_us"] == 2.5
    assert sum(step["runner_up"] is not None for step in told) > 10
    shown = run("explain", 1, "--db", there).stdout
    assert "the runner-up is" in shown
    assert "~" not in shown


def test_a_plan_without_them_says_so(run: Run, store: Callable[..., int], plan: Plan) -> None:
    shown = run("explain", store(plan)).stdout
    assert "~ is an estimate: this plan came without times of its steps" in shown


@pytest.mark.parametrize(
    ("config", "place"),
    [({"layout": "../../etc"}, r"choices\[0\].times.runner_up.config"), ({}, "runner_up.config")],
)
def test_a_runner_up_from_outside_the_search_space_is_refused(
    store: Callable[..., int], plan: Plan, tmp_path: Path, config: dict[str, str], place: str
) -> None:
    other = Candidate.from_json({"family": "framework", "config": config})
    with pytest.raises(InvalidPlan, match=place):
        _export(plan, StepTimes(2.0, 1.0, (other, 3.0)), tmp_path / "a.db")


def test_a_predicted_plan_brings_none(plan: Plan, tmp_path: Path) -> None:
    lying = replace(plan, origin="predicted")
    with pytest.raises(InvalidPlan, match="no times, for nothing was measured"):
        _export(lying, StepTimes(2.0, 1.0), tmp_path / "a.db")


def test_they_are_imported_as_they_were(plan: Plan, tmp_path: Path) -> None:
    _export(plan, StepTimes(2.0, 1.0), tmp_path / "a.db")
    with PlanDatabase.in_memory() as target:
        import_plans(tmp_path / "a.db", target)
        (stored,) = target.plans()
    assert {choice.times for choice in stored.plan.choices} == {StepTimes(2.0, 1.0)}


def _export(plan: Plan, times: StepTimes, path: Path) -> None:
    from plantune.devices.machine import cpu_environment

    choices = tuple(replace(choice, times=times) for choice in plan.choices)
    with PlanDatabase.in_memory() as database:
        database.put_plan(replace(plan, choices=choices), cpu_environment())
        export_plans(database, path, "cpu")
