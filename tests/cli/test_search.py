"""search: what it prints and returns, whatever happens to it. Nothing is measured here."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plantune.base.canonical import Attrs
from plantune.devices.machine import cpu_environment
from plantune.errors import DatabaseFull, NoViableCandidate
from plantune.kernels.family import Candidate
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.plan import Plan
from plantune.search.results import Progress, Result, StepsSum
from plantune.search.session import key_of

from ..fake_search import GivenSearch
from .conftest import FakeWorker, Run, measured, object_of


class FakeSearch(GivenSearch):
    """Measures one candidate in no time; `during` is what else happens then."""

    plan: Plan
    during: Callable[[], None] = staticmethod(lambda: None)
    best_so_far = True

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        FakeSearch.options = self.options

    def run(self, worker: FakeWorker) -> Result:
        self.report(
            Progress(
                "measuring",
                "stem: framework",
                1,
                2,
                9,
                StepsSum(3000.0, 5),
                StepsSum(4000.0, 9),
                50.0,
            )
        )
        candidate: Candidate = self.plan.choices[0].candidate
        self.database.put_trial("a" * 64, candidate, self.here, measured(10.0))
        FakeSearch.during()
        race = worker.race(None, self.plan, ["torchscript"])  # type: ignore[arg-type]
        self.database.put_plan(self.plan, self.here)
        return Result(self.plan, True, race, 1, 2)

    def partial(self) -> Result | None:
        if not self.best_so_far:
            return None
        self.database.put_plan(self.plan, self.here, partial=True)
        return Result(self.plan, False, None, 1, 2)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, plan: Plan, worker: FakeWorker) -> type[FakeSearch]:
    monkeypatch.setattr("plantune.search.session.Search", FakeSearch)
    monkeypatch.setattr(FakeSearch, "plan", plan, raising=False)
    monkeypatch.setattr(FakeSearch, "during", staticmethod(lambda: None))
    monkeypatch.setattr(FakeSearch, "best_so_far", True)
    return FakeSearch


def test_importing_torch_is_part_of_the_budget(
    run: Run, fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget of 5 s took 10."""
    clock = iter(range(100, 1000, 2))
    monkeypatch.setattr("plantune.cli.root.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr("plantune.cli.search.time", SimpleNamespace(monotonic=lambda: next(clock)))
    result = run("search", "--batch", 1, "--json")
    assert result.exit_code == 0
    assert fake.options.spent_s == 2
    assert object_of(result)["seconds"] == 4


def test_waiting_for_a_quiet_machine_is_part_of_the_budget(
    run: Run, fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which begins when the search is made."""
    made: list[bool] = []

    def wait(budget_s: float, machine: object) -> None:
        made.append(fake.options is not None)

    monkeypatch.setattr(fake, "options", None)
    monkeypatch.setattr("plantune.cli.quiet.wait_for_quiet", wait)
    assert run("search", "--batch", 1).exit_code == 0
    assert made == [True]


def test_the_plan_is_kept_and_told(run: Run, cache: Path) -> None:
    result = run("search", "--batch", 1, "--json")
    assert result.exit_code == 0
    data = object_of(result)
    assert data["complete"] is True
    assert data["plan_id"] == 1
    assert data["database"] == str(cache / "plans.db")
    assert data["workload"]["batch"] == 1
    assert (data["measured"], data["rejected"]) == (1, 2)
    assert sum(data["families"].values()) == len(data["plan"]["choices"])
    progress = "best so far about 3 ms, eager about 4 ms, 3 of 9 kernels tried"
    assert f"trying kernels, 50 s left: {progress}" in result.stderr


def test_the_verdict_and_the_plan_are_results(run: Run, cache: Path) -> None:
    result = run("search", "--batch", 1)
    assert result.stdout.splitlines()[:3] == [
        "runs as plantune's plan, 2.00 times faster than eager",
        "2.004 ms a call",
        "0.500 of eager's time",
    ]
    for words in (
        f"plan 1 in {cache / 'plans.db'}",
        "next: plantune bench --batch 1",
    ):
        assert words in result.stdout
        assert words not in result.stderr


@pytest.mark.parametrize(("compiler", "lines"), [("/no/such/compiler", 1), (None, 0)])
def test_what_a_compiler_would_bring_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, compiler: str | None, lines: int
) -> None:
    if compiler is None:
        monkeypatch.setattr("plantune.cli.checks.cxx_compiler", lambda: "/usr/bin/g++")
    else:
        monkeypatch.setenv("CXX", compiler)
    result = run("search", "--batch", 1)
    told = [line for line in result.stderr.splitlines() if "C++ compiler" in line]
    assert (
        told
        == [
            "no C++ compiler was found: apt install g++, or set CXX, for direct_conv, "
            "direct_linear, inductor, patch_conv, pooled_conv, squeeze_excite, winograd, "
            "torch.compile, which are left out"
        ]
        * lines
    )


def test_a_plan_that_lost_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch, plan: Plan, worker: FakeWorker
) -> None:
    ratio = {"ratio": 0.98, "ratio_low": 0.95, "ratio_high": 1.02}
    evidence = Attrs({**ratio, "baseline": "eager", "rivals": "eager,compile-default"})
    monkeypatch.setattr(FakeSearch, "plan", replace(plan, route="eager", evidence=evidence))
    result = run("search", "--batch", 1, "--json")
    assert result.exit_code == 0
    assert object_of(result)["runner"] == "eager"
    shown = run("search", "--batch", 1).stdout
    assert shown.splitlines()[0] == (
        "runs as eager: no plan was clearly faster (best: 0.980 of its time, 95 % interval 0.950 "
        "to 1.020)"
    )
    assert object_of(run("plans", "list", "--json"))["plans"][0]["runner"] == "eager"
    assert "run by eager" in run("plans", "list").stdout


def test_the_next_command_names_the_same_key(run: Run) -> None:
    result = run("search", "--batch", 1, "--mode", "train", "--in-channels", 4)
    assert "next: plantune bench --batch 1 --in-channels 4 --mode train" in result.stdout


def test_the_next_command_names_the_same_database(run: Run, tmp_path: Path) -> None:
    """As it must be typed; what says that there is no plan, too."""
    place = tmp_path / "my plans.db"
    found = run("search", "--batch", 1, "--db", place).stdout
    assert f"next: plantune bench --batch 1 --db '{place}'" in found
    assert "--db" not in run("search", "--batch", 1).stdout
    missing = run("bench", "--batch", 2, "--db", place)
    assert missing.exit_code == 3
    assert f"run plantune search --batch 2 --db '{place}'" in missing.stderr


def test_options_become_settings(run: Run, fake: type[FakeSearch], cache: Path) -> None:
    run("search", "--batch", 1, "--budget", 7.5, "--seed", 3, "--fresh")
    options = fake.options
    assert (options.budget_s, options.seed, options.fresh) == (7.5, 3, True)
    assert options.storage == f"sqlite:///{cache / 'optuna.db'}"
    run("search", "--batch", 1, "--resume")
    assert fake.options.fresh is False


def test_another_storage_can_be_named(run: Run, fake: type[FakeSearch], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'mine.db'}"
    assert run("search", "--batch", 1, "--storage", url).exit_code == 0
    assert fake.options.storage == url


@pytest.mark.parametrize("url", ["mine.db", "nosuchdatabase://x", "sqlite:////no/such/folder/x.db"])
def test_a_storage_that_does_not_open_is_wrong_usage(run: Run, url: str) -> None:
    result = run("search", "--batch", 1, "--storage", url, "--json")
    assert result.exit_code == 2
    assert "--storage" in object_of(result)["error"]["message"]


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_keeps_the_best_so_far(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(FakeSearch, "during", staticmethod(send(number)))
    before = signal.getsignal(number)
    result = run("search", "--batch", 1, "--json")
    assert result.exit_code == 7
    assert object_of(result)["complete"] is False
    assert signal.getsignal(number) is before
    listed = object_of(run("plans", "list", "--all", "--json"))["plans"]
    assert [item["status"] for item in listed] == ["partial"]
    assert "next: plantune search --batch 1" in run("search", "--batch", 1).stdout


def test_an_interrupt_before_anything_was_measured_saves_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSearch, "during", staticmethod(send(signal.SIGINT)))
    monkeypatch.setattr(FakeSearch, "best_so_far", False)
    result = run("search", "--batch", 1, "--json")
    assert result.exit_code == 1
    assert "nothing was saved" in object_of(result)["error"]["message"]


def fail(error: Exception) -> Callable[..., None]:
    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it


def test_when_nothing_runs_nothing_is_stored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSearch, "during", staticmethod(fail(NoViableCandidate("nothing runs"))))
    result = run("search", "--batch", 1)
    assert result.exit_code == 1
    assert "error: nothing runs" in result.stderr
    assert object_of(run("plans", "list", "--all", "--json"))["plans"] == []


@pytest.mark.parametrize("as_json", [False, True])
def test_a_full_disk_ends_in_a_printed_plan(
    run: Run, monkeypatch: pytest.MonkeyPatch, plan: Plan, as_json: bool
) -> None:
    full = fail(DatabaseFull("plans.db: disk is full"))
    memory = PlanDatabase.in_memory
    monkeypatch.setattr("plantune.search.keeping.PlanDatabase.in_memory", lambda: Roomy(memory()))
    monkeypatch.setattr(PlanDatabase, "put_trial", full)
    monkeypatch.setattr(PlanDatabase, "put_plan", full)
    result = run("search", "--batch", 1, *(["--json"] if as_json else []))
    assert result.exit_code == 1
    assert "warning: plans.db: disk is full. The search goes on in memory." in result.stderr
    assert "could not be stored" in result.stderr
    data = object_of(result)
    assert Plan.loads(json.dumps(data["plan"] if as_json else data)) == plan
    if as_json:
        assert data["plan_id"] is None
        assert "disk is full" in data["why_not_stored"]


class Roomy:
    """The database in memory, which the patches above would fill too."""

    def __init__(self, database: PlanDatabase) -> None:
        self.database = database

    def put_trial(self, *_: object) -> None:
        return None

    def put_plan(self, *_: object, partial: bool = False) -> int:
        return 1


def test_a_file_that_was_given_up_at_the_start_is_noticed(
    run: Run, monkeypatch: pytest.MonkeyPatch, plan: Plan, tmp_path: Path
) -> None:
    path = tmp_path / "plans.db"
    PlanDatabase.open(path).close()
    memory = PlanDatabase.in_memory()
    memory.path = path
    monkeypatch.setattr("plantune.cli.search.database", lambda place, read_only: memory)
    result = run("search", "--batch", 1, "--db", path)
    assert result.exit_code == 1
    assert Plan.loads(result.stdout) == plan


def test_where_nothing_can_be_written_the_plan_is_printed(
    run: Run, tmp_path: Path, plan: Plan
) -> None:
    (tmp_path / "file").write_text("")
    result = run("search", "--batch", 1, "--db", tmp_path / "file" / "plans.db")
    assert result.exit_code == 1
    assert Plan.loads(result.stdout) == plan
    assert "warning: " in result.stderr


def test_a_second_search_for_the_key_is_busy(run: Run, plan: Plan) -> None:
    key = key_of(plan.problem)
    with PlanDatabase.open() as database, database.acquire_lease(key):
        result = run("search", "--batch", 1, "--no-wait", "--json")
        others = (("--batch", 2), ("--batch", 1, "--in-channels", 11))
        for other in others:
            assert run("search", *other, "--no-wait").exit_code == 0
    assert result.exit_code == 75
    assert key in object_of(result)["error"]["message"]
    assert run("search", "--batch", 1, "--no-wait").exit_code == 0


def test_a_second_search_waits_by_default(
    run: Run, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    with PlanDatabase.open() as database:
        lease = database.acquire_lease(key_of(plan.problem))
        wait = PlanDatabase.wait_for_lease

        def release_and_wait(self: PlanDatabase, key: str, timeout_s: float) -> Any:
            waited.append(timeout_s)
            lease.release()
            return wait(self, key, timeout_s)

        monkeypatch.setattr(PlanDatabase, "wait_for_lease", release_and_wait)
        result = run("search", "--batch", 1, "--budget", 30)
    assert result.exit_code == 0
    assert waited == [180.0]
    assert "waiting up to 180 s" in result.stderr


def test_another_arch_needs_its_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plantune.devices.gpus.gpus_here", tuple)
    result = run("search", "--arch", "sm90", "--batch", 128, "--json")
    assert result.exit_code == 6
    message = object_of(result)["error"]["message"]
    assert "cannot measure for sm90: sm90 needs a GPU of compute capability 9.0" in message
    assert "torch sees no CUDA GPU here" in message
    assert "--arch cpu" in message


def test_a_dry_run_tells_what_would_be_tried(
    run: Run, store: Callable[..., int], plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSearch, "run", fail(AssertionError("it must not run")))
    result = run("search", "--batch", 1, "--dry-run", "--budget", 20, "--json")
    assert result.exit_code == 0
    data = object_of(result)
    assert data["candidates"] == sum(data["families"].values()) > data["distinct_steps"]
    assert data["steps"] >= data["distinct_steps"] > data["ops"] / 2
    assert (data["known"], data["at_most_s"]) == (0, 20.0)
    assert "Nothing was measured" in run("search", "--batch", 1, "--dry-run").stdout


def test_a_dry_run_counts_what_is_known(run: Run, problem: Any, plan: Plan) -> None:
    from plantune.report.steps import plan_steps

    step, candidate = plan_steps(plan, problem.graph)[0]
    other = replace(cpu_environment(), threads=99)
    with PlanDatabase.open() as database:
        database.put_trial(step.signature, candidate, cpu_environment(), measured(1.0))
        database.put_trial("b" * 64, candidate, cpu_environment(), measured(1.0))
        database.put_trial(step.signature, candidate, other, measured(1.0))
    assert object_of(run("search", "--batch", 1, "--dry-run", "--json"))["known"] == 1


@pytest.mark.parametrize("gpus", ["0", "all", "0,0", "-1", "one", ""])
def test_gpus_are_numbers_and_for_the_arch_of_a_gpu(run: Run, gpus: str) -> None:
    result = run("search", "--arch", "cpu", "--batch", 1, "--gpus", gpus)
    assert result.exit_code == 2
    assert "--gpus" in result.stderr
