"""The command line in this process, on a database of its own, with nothing measured for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured, Outcome, Rejected
from plantune.cli import console, main
from plantune.devices.machine import Environment, cpu_environment
from plantune.errors import NoPlanLeft
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.measure.racing.race import Detail, Race
from plantune.measure.subject import Raced
from plantune.measure.timing import Timing, ratio_interval
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.guess import COMPILED, framework_plan, hand_plan
from plantune.plans.plan import Plan
from plantune.plans.problem import PROBLEM_FIELDS
from plantune.plans.workload import Workload
from plantune.space.search_space import load_search_space

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "se_resnet9_fixup"
EVIDENCE = Attrs(median_ms=2.0, baseline="eager", baseline_ms=4.0, ratio=0.5)
Run = Callable[..., Result]


@pytest.fixture(autouse=True, scope="session")
def _quick_storages(migrations_read_once: None) -> None: ...


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees the user's own plans."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def compiled_before(cache: Path, binaries: Path) -> None:
    """The test's cache has the CUDA kernels that other tests compiled."""
    cache.mkdir(parents=True)
    (cache / "cuda").symlink_to(binaries / "cuda")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are whole, also in a test process that was told how wide its terminal is."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits until this machine is quiet."""
    monkeypatch.setattr("plantune.cli.quiet.wait_for_quiet", lambda budget_s, machine: None)


@pytest.fixture
def no_plan_left() -> None:
    """For tests in which a search may end without a plan."""


@pytest.fixture(autouse=True)
def nothing_hidden(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any other one that is an error, as pytest has it for warnings that no command shows: no
    fault of a kernel hides behind it.
    """
    shown = console._show

    def strict(message: Warning | str, *where: Any, **how: Any) -> None:
        if isinstance(message, NoPlanLeft):
            raise message
        shown(message, *where, **how)

    if "no_plan_left" not in request.fixturenames:
        monkeypatch.setattr(console, "_show", strict)


@pytest.fixture
def run() -> Run:
    """A command's result: exit_code, stdout, stderr."""

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(main, [str(a) for a in arguments], prog_name="plantune")

    return invoke


def object_of(result: Result) -> dict[str, Any]:
    """The one JSON object on stdout, and nothing else there."""
    assert result.stdout.count("\n") == 1, result.stdout
    data = json.loads(result.stdout)
    assert type(data) is dict
    return data


@pytest.fixture(scope="session")
def problem() -> Workload:
    return Workload(NETWORK, 1)


@pytest.fixture(scope="session")
def plan(problem: Workload) -> Plan:
    """The framework's kernels, as if a search had found nothing better."""
    made = framework_plan(problem.graph, load_search_space("cpu"), network=NETWORK)
    return changed(made, origin="measured", evidence=EVIDENCE)


@pytest.fixture(scope="session")
def fused_plan(problem: Workload) -> Plan:
    made = hand_plan(problem.graph, load_search_space("cpu"), network=NETWORK, without=COMPILED)
    return changed(made, origin="measured", evidence=EVIDENCE)


def changed(plan: Plan, **fields: Any) -> Plan:
    """The plan with other fields, of its problem too."""
    of_problem = {name: fields.pop(name) for name in PROBLEM_FIELDS if name in fields}
    return replace(plan, problem=replace(plan.problem, **of_problem), **fields)


@pytest.fixture
def store(cache: Path) -> Callable[..., int]:
    """Puts a plan into the user's database and returns its id."""

    def put(plan: Plan, environment: Environment | None = None, *, partial: bool = False) -> int:
        with PlanDatabase.open() as database:
            return database.put_plan(plan, environment or cpu_environment(), partial=partial)

    return put


SMALL = """
from torch import nn

def small():
    layers = nn.Conv2d(4, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU()
    return nn.Sequential(*layers)
"""


@pytest.fixture
def small_network(tmp_path: Path) -> list[object]:
    """Arguments for a network on which a search of its own process measures soon. Its short budget
    leaves little time for waiting until other tests are quiet.
    """
    file = tmp_path / "small.py"
    file.write_text(SMALL)
    sizes = ["--in-channels", 4, "--image-size", 8]
    return ["--model", f"{file}:small", *sizes, "--budget", 40]


def timing(ms: float) -> Timing:
    return Timing(tuple(1e3 * ms * (1 + 0.001 * (i % 5)) for i in range(20)))


def measured(us: float) -> Measured:
    return Measured(us, us * 0.9, us * 1.1, 20, 1e-7, 1e-6, True)


def detail(name: str, queued: Timing) -> Detail:
    """Ready after a second; images in turns take as long as the same ones."""
    frozen = name.endswith("frozen") or name.startswith("torchscript")
    kinds = {"same": queued, "fresh": queued}
    return Detail("frozen" if frozen else "live", 1.0, False, False, kinds, kinds)


@dataclass
class FakeWorker:
    """Answers as a worker would, at once; tests change its fields."""

    times_ms: Mapping[str, float]
    outcomes: Callable[[Step, Candidate], Outcome]
    failure: BaseException | None = None
    threads: int | None = None
    limits: object = None
    environment: object = None

    def __call__(self, **options: object) -> FakeWorker:
        return self

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def race(
        self,
        raced: Raced,
        plan: Plan,
        routes: Sequence[str],
        effort: object = None,
        seed: int = 0,
        *,
        detailed: bool = False,
    ) -> Race:
        self.raced, self.effort = raced, effort
        if self.failure is not None:
            raise self.failure
        names = ["plantune", *(["plantune-frozen"] if detailed else []), *routes]
        timings = {name: timing(self.times_ms.get(name, 5.0)) for name in names}
        best = min(routes, key=lambda name: timings[name].median_us)
        ratio = ratio_interval(timings["plantune"], timings[best])
        details = {name: detail(name, timings[name]) for name in names} if detailed else {}
        return Race(timings, {}, best, ratio, in_turns=64, details=details)

    def check_and_time(
        self,
        step: Step,
        candidate: Candidate,
        arch: str,
        effort: object = None,
        seeds: tuple[int, ...] = (0, 1),
    ) -> Outcome:
        return self.outcomes(step, candidate)

    def start(self, cut_at: float | None = None) -> None:
        pass

    def rooflines(self, steps: Sequence[Step], arch: str) -> list[float]:
        return [2.5] * len(steps)

    def time_programs(
        self, graph: object, plans: Sequence[Plan], effort: object = None, seed: int = 0
    ) -> list[Timing | Rejected]:
        return [timing(4.0 / (1 + number)) for number in range(len(plans))]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, nothing_built: None) -> FakeWorker:
    """What derives from the worker was imported before it is replaced: `nothing_built` did so."""
    fake = FakeWorker({"plantune": 2.0, "torchscript": 4.0}, lambda step, candidate: measured(10.0))
    monkeypatch.setattr("plantune.measure.worker.client.Worker", fake)
    return fake


def start(
    *arguments: object, stderr: int = subprocess.PIPE, **environment: str
) -> subprocess.Popen[bytes]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "plantune", *map(os.fsencode, map(str, arguments))]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=stderr,
    )
