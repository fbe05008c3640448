"""bench --store: a race becomes the evidence of the plan that ran in it."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plantune.base.canonical import Attrs
from plantune.cli import bench, bench_store
from plantune.devices.machine import cpu_environment
from plantune.errors import ForeignFile
from plantune.measure.racing.routes import framework_routes
from plantune.plans.database import plan_database as database
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.proofs import is_proved
from plantune.plans.database.rows import StoredPlan
from plantune.plans.plan import Plan
from plantune.plans.raced_routes import RacedRoutes
from plantune.plans.step_times import StepTimes
from plantune.plans.verdict import Interval
from plantune.search.contenders import judgement

from .conftest import FakeWorker, Run, object_of

# Without it a race is a real one, which has torch compile the network twice.
pytestmark = pytest.mark.usefixtures("worker")
STORE = ("bench", "--batch", 1, "--store")
NO_COMPILER = [name for name in framework_routes("cpu") if not name.startswith("compile")]
Store = Callable[..., int]


def newest() -> StoredPlan:
    with PlanDatabase.open(read_only=True) as opened:
        return opened.plans()[0]


@pytest.fixture
def searched(plan: Plan) -> Plan:
    """A plan that never met torch.compile, as a search leaves it."""
    found = {"rivals": ",".join(NO_COMPILER), "deterministic": 1, "search_s": 60.0}
    return replace(plan, evidence=Attrs({**plan.evidence, **found, "machine": "busy"}))


def test_a_race_with_compiled_routes_is_the_evidence_from_then_on(
    run: Run, store: Store, searched: Plan, worker: FakeWorker
) -> None:
    before = store(searched)
    worker.times_ms = {"plantune": 2.0, "compile-default": 4.0}
    data = object_of(run(*STORE, "--json"))
    stored = newest()
    assert data["stored_plan_id"] == stored.id == before + 1
    assert stored.plan.choices == searched.choices
    evidence = stored.plan.evidence
    assert RacedRoutes.of(evidence) == RacedRoutes(framework_routes("cpu"), complete=True)
    assert (evidence["baseline"], evidence["ratio"]) == ("compile-default", pytest.approx(0.5))
    assert (evidence["deterministic"], evidence["search_s"]) == (1, 60.0)
    assert stored.plan.route == "program"
    assert is_proved(stored.plan, cpu_environment())
    assert "never raced against torch.compile" not in run("plans", "list").stdout


def test_without_store_nothing_is_kept(run: Run, store: Store, plan: Plan) -> None:
    before = store(plan)
    assert object_of(run("bench", "--batch", 1, "--json"))["stored_plan_id"] is None
    assert newest().id == before


def test_what_loses_is_run_by_the_winner(
    run: Run, store: Store, plan: Plan, worker: FakeWorker
) -> None:
    store(plan)
    worker.times_ms = {"plantune": 5.0, "eager": 4.0, "compile-default": 3.0}
    assert run(*STORE).exit_code == 0
    found = newest().plan
    assert found.route == "eager"
    assert found.evidence["lost_to"] == "compile-default"


def test_a_plan_of_another_machine_is_measured_here_from_then_on(
    run: Run, store: Store, searched: Plan, worker: FakeWorker
) -> None:
    timed = replace(searched.choices[0], times=StepTimes(3.0, 1.0))
    made = replace(searched, choices=(timed, *searched.choices[1:]), origin="predicted")
    store(made, replace(cpu_environment(), threads=99))
    assert run(*STORE).exit_code == 0
    stored = newest()
    assert (stored.environment, stored.plan.origin) == (cpu_environment(), "measured")
    assert all(choice.times is None for choice in stored.plan.choices)
    assert "search_s" not in stored.plan.evidence


@pytest.mark.parametrize("left_out", ["eager", "compile-default"])
def test_a_race_that_says_less_is_refused_first(
    run: Run, store: Store, searched: Plan, worker: FakeWorker, left_out: str
) -> None:
    met = ",".join((*NO_COMPILER, "compile-default"))
    store(replace(searched, evidence=Attrs({**searched.evidence, "rivals": met})))
    worker.failure = AssertionError("it must not run")
    peers = ",".join(name for name in framework_routes("cpu") if name != left_out)
    result = run(*STORE, "--peers", peers)
    assert result.exit_code == 2
    assert f"needs these routes in the race too: {left_out}" in result.stderr


def test_a_race_in_which_one_did_not_run_is_not_stored(
    run: Run, store: Store, plan: Plan, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, race = store(plan), worker.race

    def without_torchscript(*arguments, **named):
        found = race(*arguments, **named)
        timings = {name: t for name, t in found.timings.items() if name != "torchscript"}
        return replace(found, timings=timings, best_route="eager")

    monkeypatch.setattr(worker, "race", without_torchscript)
    result = run(*STORE)
    assert result.exit_code == 1
    assert "not stored: torchscript did not run" in result.stdout
    assert newest().id == before


def test_whole_steps_are_no_evidence_of_passes(run: Run, store: Store, plan: Plan) -> None:
    store(plan)
    result = run(*STORE, "--mode", "train", "--step")
    assert result.exit_code == 2
    assert "leave out --step" in result.stderr


def test_the_frameworks_kernels_get_no_evidence_of_the_plan_that_they_replace(
    run: Run, store: Store, fused_plan: Plan, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a captured default plan runs the network if eager's kernels win."""
    store(replace(fused_plan, evidence=Attrs(deterministic=1, search_s=60.0)))
    plain = replace(plan, evidence=Attrs())
    monkeypatch.setattr(judgement, "judged_alone", lambda *_: plain)
    result = run(*STORE)
    found = newest().plan
    assert found.choices == plain.choices != fused_plan.choices
    assert not {"deterministic", "search_s"} & set(found.evidence)
    assert not is_proved(found, cpu_environment())
    assert "is of the framework's kernels" in result.stdout


def test_where_nothing_can_be_kept_it_says_so(
    run: Run, store: Store, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(plan)
    monkeypatch.setattr(database, "lies_in_file", lambda *_: False)
    result = run(*STORE)
    assert result.exit_code == 1
    assert "not stored" in result.stdout


@pytest.fixture
def stored(store: Store, plan: Plan) -> None:
    store(plan)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, Exception], None]:
    """Has a function of a module raise an error."""

    def fail(module: Any, name: str, error: Exception) -> None:
        def fails(*arguments: object) -> None:
            raise error

        monkeypatch.setattr(module, name, fails)

    return fail


@pytest.mark.parametrize(
    ("module", "error", "code"),
    [
        (bench_store, ForeignFile("a later plantune made it"), 4),
        (bench, OSError(errno.ENOSPC, "No space left on device"), 1),
    ],
    ids=["database", "plot"],
)
@pytest.mark.usefixtures("stored")
def test_an_error_at_the_end_loses_nothing_of_the_race(
    run: Run, failing: Callable[..., None], tmp_path: Path, module: Any, error: Exception, code: int
) -> None:
    """Files are written though the database is not, and the rest though one of them is not."""
    failing(module, "store_race" if module is bench_store else "bar_plot", error)
    files = ("--output", tmp_path / "bench.json", "--plot", tmp_path / "bench.svg")
    result = run(*STORE, "--json", *files)
    data = json.loads(result.stdout)
    assert result.exit_code == code
    assert str(error) in result.stderr
    assert (data["stored_plan_id"] is None) == (module is bench_store)
    assert json.loads((tmp_path / "bench.json").read_text()) == data
    assert (tmp_path / "bench.svg").exists() == (module is bench_store)


def test_a_race_that_decides_nothing_does_not_choose_who_runs(
    run: Run, store: Store, plan: Plan, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On busy cores: the best route would run a network whose plan is the faster one."""
    before, race = store(plan), worker.race

    def disturbed(*arguments, **named):
        return replace(race(*arguments, **named), ratio=Interval(1.36, 0.11, 16.2))

    monkeypatch.setattr(worker, "race", disturbed)
    result = run(*STORE)
    assert result.exit_code == 1
    assert "not stored: this race did not decide who is faster" in result.stdout
    assert newest().id == before
