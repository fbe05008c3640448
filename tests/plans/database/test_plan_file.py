"""The files that `plan=` takes: JSON of one plan, databases of several, and everything else."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from plantune.base.canonical import Attrs
from plantune.devices.machine import Environment
from plantune.errors import ForeignPlan, InvalidPlan, NoPlan
from plantune.kernels.family import Candidate
from plantune.plans.database.exports import export_plans
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.plan_file import PlanFile, read_plan_file
from plantune.plans.plan import Choice, Plan
from plantune.plans.problem import Problem

HERE = Environment("cpu", "A CPU", "0" * 16, 2, "2.13.0", "0.1.0", "g++", "Linux x86_64")
FRAMEWORK = Candidate("framework", Attrs(layout="nhwc"))
PLAN = Plan(Problem("net", "a" * 64, "cpu", 8, "float32", "infer"), (Choice(("conv",), FRAMEWORK),))
OTHER = replace(PLAN, problem=replace(PLAN.problem, graph="b" * 64, batch=4))
PROBLEM = PLAN.problem


def database_of(path: Path, *plans: tuple[Plan, Environment]) -> Path:
    with PlanDatabase.open(path) as database:
        for plan, environment in plans:
            database.put_plan(plan, environment)
    return path


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    made = database_of(tmp_path / "all.db", (PLAN, HERE), (OTHER, HERE))
    with PlanDatabase.open(made) as database:
        export_plans(database, tmp_path / "cpu.db", "cpu")
    return tmp_path / "cpu.db"


def test_a_plan_as_json(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.dumps() + "\n", encoding="utf-8")
    assert read_plan_file(path) == PLAN


def plans_in(path: Path) -> PlanFile:
    found = read_plan_file(path)
    assert isinstance(found, PlanFile)
    return found


@pytest.mark.parametrize("name", ["cpu.db", "all.db"])
def test_the_plan_for_the_layers_is_taken_from_a_database(exported: Path, name: str) -> None:
    """From an exported one, and from that of a search."""
    file = plans_in(exported.with_name(name))
    assert file.plan_for(PROBLEM, HERE) == PLAN
    assert file.plan_for(replace(PROBLEM, network="other"), HERE) == PLAN
    assert file.plan_for(OTHER.problem, HERE) == OTHER


def test_a_database_without_it_says_what_it_has(exported: Path) -> None:
    with pytest.raises(NoPlan, match=r"cpu\.db: has no plan .* batch 8, train, .* it has "):
        plans_in(exported).plan_for(replace(PROBLEM, mode="train"), HERE)
    with pytest.raises(NoPlan, match="net, batch 4, infer, float32, cpu"):
        plans_in(exported).plan_for(replace(PROBLEM, graph="c" * 64), HERE)


def test_plans_for_another_chip_are_refused(tmp_path: Path) -> None:
    gpu = replace(HERE, arch="sm90", device="H200")
    path = database_of(
        tmp_path / "gpu.db", (replace(PLAN, problem=replace(PLAN.problem, arch="sm90")), gpu)
    )
    with pytest.raises(ForeignPlan, match=r"expected cpu \(A CPU\), got sm90 \(H200\)"):
        plans_in(path).plan_for(PROBLEM, HERE)


def test_partial_plans_are_none(tmp_path: Path) -> None:
    with PlanDatabase.open(tmp_path / "a.db") as database:
        database.put_plan(PLAN, HERE, partial=True)
    with pytest.raises(NoPlan, match=r"a\.db: has no complete plan"):
        read_plan_file(tmp_path / "a.db")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "holds no plan"),
        (b"\xff\xfe\x00", "is not text"),
        (b"dear all", "holds no plan"),
        (b"SQLite format 3\0" + b"\1" * 4096, "cannot be read"),
    ],
)
def test_another_file_is_refused_with_what_is_wanted(
    tmp_path: Path, content: bytes, fault: str
) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(content)
    with pytest.raises(InvalidPlan, match=rf"a\.db: {fault}.*plantune export"):
        read_plan_file(path)


def test_half_a_plan_is_refused_at_its_place(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.dumps()[:100], encoding="utf-8")
    with pytest.raises(InvalidPlan, match=r"plan\.json: this is not JSON"):
        read_plan_file(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [a_folder, a_pipe, lambda path: None])
def test_what_is_not_a_file_is_refused_and_not_waited_for(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "plan")
    with pytest.raises(InvalidPlan, match=r"plan: (is a|cannot be read)"):
        read_plan_file(tmp_path / "plan")


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW more AS SELECT * FROM plans",
        "CREATE TRIGGER t AFTER INSERT ON plans BEGIN SELECT 1; END",
        "UPDATE meta SET value = '99'",
    ],
)
def test_a_database_with_something_else_in_it_is_refused(exported: Path, statement: str) -> None:
    with closing(sqlite3.connect(exported)) as connection:
        connection.execute(statement)
        connection.commit()
    with pytest.raises(InvalidPlan, match="schema 1 expected"):
        read_plan_file(exported)
