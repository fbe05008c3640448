"""Plans, machines and files for tests of the plan database; the library in another process."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plantune.base.canonical import Attrs
from plantune.devices.machine import Environment
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.plans.database.exports import export_plans
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.plan import Choice, Plan
from plantune.plans.problem import PROBLEM_FIELDS, Problem

ROOT = Path(__file__).resolve().parents[3]

# What the scripts of other processes start with; they take the database's path as an argument.
PRELUDE = """
import sys
from dataclasses import replace
from pathlib import Path
from plantune.devices.machine import Environment
from plantune.kernels.family import Candidate
from plantune.base.outcome import Measured, Rejected
from plantune.plans.plan import Choice, Plan
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.exports import export_plans
from plantune.plans.problem import Problem
from plantune.base.canonical import Attrs

HERE = Environment("cpu", "A CPU", "0" * 16, 2, "2.13.0", "0.1.0", "g++", "Linux x86_64")
NHWC = Candidate("onednn_conv", Attrs(layout="nhwc", prepack=True))
PLAN = Plan(Problem("net", "a" * 64, "cpu", 8, "float32", "infer"), (Choice(("conv",), NHWC),))
path = Path(sys.argv[1])
"""

Process = subprocess.Popen[str]


@pytest.fixture
def here() -> Environment:
    """This machine, as far as these tests go."""
    return Environment("cpu", "A CPU", "0" * 16, 2, "2.13.0", "0.1.0", "g++", "Linux x86_64")


@pytest.fixture
def candidate() -> Candidate:
    return Candidate("onednn_conv", Attrs(layout="nhwc", prepack=True))


@pytest.fixture
def make_plan(candidate: Candidate) -> Callable[..., Plan]:
    """A measured plan of two steps; the arguments replace its fields and its problem's."""
    framework = Candidate("framework", Attrs(layout="nchw"))
    choices = (
        Choice(("layers.0/conv2d", "layers.0.relu/relu"), candidate),
        Choice(("d(layers.0/conv2d)/add_2",), framework),
    )
    evidence = Attrs(median_ms=2.5, baseline="torchscript", baseline_ms=4, ratio=0.625)
    call = (("x", TensorType((8, 3, 64, 64))), ("scale", 0.5))
    problem = Problem("net", "a" * 64, "cpu", 8, "float32", "infer", call)

    def make(**changes: Any) -> Plan:
        other = {name: changes.pop(name) for name in PROBLEM_FIELDS if name in changes}
        wanted = replace(problem.key, **other)
        wanted = problem if wanted == problem.key else wanted
        return replace(Plan(wanted, choices, "measured", evidence), **changes)

    return make


@pytest.fixture
def plan(make_plan: Callable[..., Plan]) -> Plan:
    return make_plan()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plans.db"


@pytest.fixture
def database(path: Path) -> Iterator[PlanDatabase]:
    with PlanDatabase.open(path) as opened:
        yield opened


@pytest.fixture
def start(copied_processes: None) -> Iterator[Callable[..., Process]]:
    """Starts a script in another process; whatever still runs at the end of a test is killed."""
    started: list[Process] = []

    def run(script: str, *arguments: object) -> Process:
        command = [sys.executable, "-c", PRELUDE + script, *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def target() -> Iterator[PlanDatabase]:
    with PlanDatabase.in_memory() as database:
        yield database


@pytest.fixture
def exported(
    database: PlanDatabase, tmp_path: Path, here: Environment, make_plan: Callable[..., Plan]
) -> Path:
    """A file with plans for two batches."""
    for batch in (8, 16):
        database.put_plan(make_plan(batch=batch), here)
    export_plans(database, tmp_path / "cpu.db", "cpu")
    return tmp_path / "cpu.db"


def rows_of(path: Path, table: str) -> list[dict[str, Any]]:
    """The rows of a database file, whatever wrote it."""
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return [{**row} for row in connection.execute(f"SELECT * FROM {table}")]
