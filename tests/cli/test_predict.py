"""search --predict: a plan for a chip that is not here, which nothing shows as measured."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from plantune import load_model
from plantune.base.canonical import Attrs
from plantune.base.outcome import Rejected
from plantune.cli import main
from plantune.devices.cuda.build import Binary
from plantune.devices.machine import Environment, cpu_environment, predicted_environment
from plantune.errors import InvalidPlan
from plantune.kernels.family import Candidate
from plantune.kernels.resolved import ResolvedStep
from plantune.measure.worker.client import Worker
from plantune.plans.database.exports import export_plans, import_plans
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.plan import Plan
from plantune.runtime.calls.choose import PredictedPlan

from .conftest import FakeWorker, Run, changed, object_of

LOG = "Compiling entry function 'run' for 'sm_80'\n0 bytes spill stores\nUsed 40 registers, 0 bytes"
PREDICTED = Attrs(predicted_ms=0.4, built=3, rejected=0, numerics="not checked")


def without_gpu(patch: pytest.MonkeyPatch) -> list[Candidate]:
    """No GPU is here and every kernel builds at once: those that did."""
    seen: list[Candidate] = []

    def build(chosen: ResolvedStep, arch: object) -> Binary:
        seen.append(chosen.candidate)
        return Binary("key", b"", LOG + " smem\n")

    patch.setattr("plantune.search.predict.build", build)
    patch.setattr("plantune.devices.gpus.gpus_here", tuple)
    return seen


@pytest.fixture(autouse=True)
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    return without_gpu(monkeypatch)


@pytest.fixture(scope="module")
def prediction(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A database with a plan that was predicted for Ampere, and what was said of it."""
    path = tmp_path_factory.mktemp("predicted") / "plans.db"
    with pytest.MonkeyPatch.context() as patch:
        without_gpu(patch)
        options = "--arch", "sm80", "--batch", "4", "--predict", "--db", str(path)
        result = CliRunner().invoke(main, ["search", *options])
    assert result.exit_code == 0, result.stderr
    return path, result.stdout


@pytest.fixture
def predicted(prediction: tuple[Path, str], cache: Path) -> int:
    """The id of that plan in the user's database."""
    path, _ = prediction
    cache.mkdir()
    with PlanDatabase.open(path) as database:
        (stored,) = database.plans()
    shutil.copy(path, cache / "plans.db")
    return stored.id


def test_it_is_planned_without_the_gpu(
    run: Run, builds: list[Candidate], prediction: tuple[Path, str]
) -> None:
    result = run("search", "--arch", "sm80", "--batch", 4, "--predict", "--json")
    assert result.exit_code == 0
    data = object_of(result)
    assert data["origin"] == data["plan"]["origin"] == "predicted"
    assert data["environment"]["device"] == "predicted for sm80 (A100 SXM 80GB)"
    assert data["environment"]["arch"] == "sm80"
    assert data["evidence"]["built"] == len(builds) > 0
    assert "not checked: there is no GPU of a later arch here" in data["evidence"]["numerics"]
    assert not {"median_ms", "ratio", "baseline_ms"} & set(data["evidence"])
    compiled = [row for row in data["steps"] if row["footprint"] is not None]
    assert compiled
    assert {row["footprint"]["registers"] for row in compiled} == {40}
    assert all(row["guess_us"] > 0 for row in compiled)
    _, shown = prediction
    said = ("PREDICTED for sm80", "numerics not checked", "registers", "next: plantune verify ")
    assert all(text in shown for text in said)


def test_without_predict_it_needs_the_gpu(run: Run) -> None:
    result = run("search", "--arch", "sm80", "--batch", 4)
    assert result.exit_code == 6
    assert "cannot measure for sm80" in result.stderr
    assert "--predict plans for sm80 unmeasured" in result.stderr


def test_the_cpu_is_measured_not_predicted(run: Run) -> None:
    assert run("search", "--arch", "cpu", "--predict").exit_code == 2


def test_a_dry_run_builds_nothing(run: Run, builds: list[Candidate]) -> None:
    result = run("search", "--arch", "sm80", "--batch", 4, "--predict", "--dry-run", "--json")
    assert result.exit_code == 0
    assert object_of(result)["candidates"] > 0
    assert not builds


def test_lists_mark_it(run: Run, predicted: int) -> None:
    result = run("plans", "list", "--json")
    (row,) = object_of(result)["plans"]
    assert (row["origin"], row["match"]) == ("predicted", "foreign")
    text = run("plans", "list").stdout
    assert "complete, predicted" in text
    line = next(line for line in text.splitlines() if "sm80" in line)
    assert line.split()[6:8] == ["-", "-"]
    shown = run("plans", "show", predicted)
    assert "predicted for sm80" in shown.stdout
    assert "predicted_ms" in shown.stdout
    assert "median_ms" not in shown.stdout


def test_explain_calls_its_times_guesses(run: Run, predicted: int) -> None:
    result = run("explain", predicted, "--json")
    assert result.exit_code == 0
    data = object_of(result)
    assert data["origin"] == "predicted"
    assert all(step["chosen_us"] is None for step in data["steps"])
    assert "PREDICTED for sm80: nothing was measured" in run("explain", predicted).stdout
    assert "by a guess of" in run("explain", predicted).stdout


def test_what_was_refused_is_explained(
    run: Run, monkeypatch: pytest.MonkeyPatch, builds: list[Candidate]
) -> None:
    def build(chosen: ResolvedStep, arch: object) -> Binary:
        builds.append(chosen.candidate)
        log = LOG.replace("0 bytes spill", "64 bytes spill") if len(builds) == 1 else LOG
        return Binary("key", b"", log + " smem\n")

    monkeypatch.setattr("plantune.search.predict.build", build)
    result = run("search", "--arch", "sm80", "--batch", 4, "--predict")
    assert "rejected for 1 step: " in result.stdout
    assert "it spills 64 bytes of a thread's registers" in " ".join(result.stdout.split())
    explained = run("explain", 1, "--all")
    assert "it spills 64 bytes" in explained.stdout


def test_it_is_refused_where_it_cannot_run(run: Run, predicted: int) -> None:
    assert run("verify", predicted).exit_code == 4
    assert run("verify", "--arch", "sm80", "--batch", 4).exit_code == 6
    result = run("explain", "--arch", "sm86", "--batch", 4)
    assert result.exit_code == 4
    assert "expected sm86, got sm80 (predicted for sm80" in result.stderr


def test_it_is_explained_wherever_it_is_asked_for(run: Run, predicted: int) -> None:
    result = run("explain", "--arch", "sm80", "--batch", 4, "--json")
    assert object_of(result)["plan_id"] == predicted


def test_export_takes_the_arch_from_the_name_of_the_file(
    run: Run, predicted: int, tmp_path: Path
) -> None:
    file = tmp_path / "sm80.db"
    result = run("export", file, "--json")
    assert result.exit_code == 0
    (row,) = object_of(result)["plans"]
    assert (row["arch"], row["origin"]) == ("sm80", "predicted")
    assert run("export", tmp_path / "sm86.db").exit_code == 3
    with PlanDatabase.open(tmp_path / "other.db") as database:
        (plan,) = import_plans(file, database)
    assert plan.origin == "predicted"


def test_a_predicted_plan_with_measured_times_is_refused(plan: Plan, tmp_path: Path) -> None:
    lying = changed(plan, origin="predicted", evidence=Attrs(PREDICTED, median_ms=0.1))
    with PlanDatabase.in_memory() as database:
        database.put_plan(lying, cpu_environment())
        with pytest.raises(InvalidPlan, match="nothing was measured"):
            export_plans(database, tmp_path / "cpu.db", "cpu")


def there() -> Environment:
    return replace(cpu_environment(), device="predicted for cpu", device_digest="0" * 16)


def test_a_measured_plan_comes_before_a_newer_predicted_one(
    run: Run, store: Callable[..., int], plan: Plan
) -> None:
    measured = store(plan, replace(cpu_environment(), threads=77))
    store(changed(plan, origin="predicted", evidence=PREDICTED), there())
    assert object_of(run("explain", "--batch", 1, "--json"))["plan_id"] == measured


def test_loading_it_warns_once(store: Callable[..., int], plan: Plan) -> None:
    store(changed(plan, origin="predicted", evidence=PREDICTED), there())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load_model(plan.problem.network, batch=1, device="cpu")
        for _ in range(2):
            model(torch.randn(1, 3, 64, 64))
    assert [warning.category for warning in caught] == [PredictedPlan]
    text = str(caught[0].message)
    assert "was predicted for cpu, nothing of it was measured" in text
    assert "plantune verify" in text


def test_verify_makes_it_a_measured_one(
    run: Run, store: Callable[..., int], plan: Plan, worker: FakeWorker
) -> None:
    worker.times_ms = {"plantune": 2.0, "eager": 4.0}
    store(changed(plan, origin="predicted", evidence=PREDICTED), there())
    data = object_of(run("verify", "--batch", 1, "--json"))
    with PlanDatabase.open() as database:
        newest = database.plans()[0]
    assert newest.id == data["measured_plan_id"]
    assert (newest.plan.origin, newest.environment) == ("measured", cpu_environment())
    assert newest.plan.evidence["median_ms"] == pytest.approx(2.0, rel=0.01)
    assert "predicted_ms" not in newest.plan.evidence
    assert newest.plan.choices == plan.choices
    again = object_of(run("verify", "--batch", 1, "--json"))
    assert again["measured_plan_id"] is None


def test_wrong_numbers_keep_it_predicted(
    run: Run, store: Callable[..., int], plan: Plan, worker: FakeWorker
) -> None:
    worker.outcomes = lambda step, candidate: Rejected("numerics", "7 instead of 8")
    store(changed(plan, origin="predicted", evidence=PREDICTED), there())
    assert run("verify", "--batch", 1).exit_code == 5
    with PlanDatabase.open() as database:
        assert [item.plan.origin for item in database.plans()] == ["predicted"]


def test_a_later_gpu_checks_numbers(
    run: Run, monkeypatch: pytest.MonkeyPatch, builds: list[Candidate]
) -> None:
    asked: list[tuple[str, str]] = []

    def check(self: Worker, step: object, candidate: Candidate, arch: str) -> Rejected | None:
        asked.append((candidate.family, arch))
        return Rejected("numerics", "7 instead of 8") if len(asked) == 1 else None

    monkeypatch.setattr(Worker, "check_elsewhere", check)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "NVIDIA H200")
    monkeypatch.setattr("plantune.cli.predict.later_gpu", lambda arch: FakeGpu())
    result = run("search", "--arch", "sm80", "--batch", 4, "--predict", "--json")
    data = object_of(result)
    assert data["evidence"]["numerics"] == "checked on NVIDIA H200 through PTX"
    assert [row["stage"] for row in data["rejected"]] == ["numerics"]
    assert len(asked) > 1
    assert {arch for _, arch in asked} == {"sm80"}


class FakeGpu:
    place = torch.device("cuda", 0)


def test_the_environment_of_a_prediction_is_not_a_machines() -> None:
    environment = predicted_environment("sm70")
    assert environment.arch == "sm70"
    assert "predicted" in environment.device
    assert environment.compiler.startswith("NVRTC 12")
    assert Environment.from_json(environment.to_json()) == environment
    assert cpu_environment().match(environment) == "foreign"
    assert environment.key != predicted_environment("sm75").key
