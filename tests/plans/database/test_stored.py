"""What the runtime reads of stored plans: never an error, never a row that was changed."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plantune.base.canonical import Attrs
from plantune.devices.machine import Environment
from plantune.errors import DamagedRow, DatabaseWarning
from plantune.kernels.family import Candidate
from plantune.plans.database import stored
from plantune.plans.database.exports import export_plans
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.stored import find_stored_plan
from plantune.plans.plan import Choice, Plan
from plantune.plans.problem import Problem

HERE = Environment("cpu", "A CPU", "0" * 16, 2, "2.13.0", "0.1.0", "g++", "Linux x86_64")
THERE = replace(HERE, device="Another CPU")
FRAMEWORK = Candidate("framework", Attrs(layout="nhwc"))
PLAN = Plan(Problem("net", "a" * 64, "cpu", 8, "float32", "infer"), (Choice(("conv",), FRAMEWORK),))
OTHER = replace(PLAN, evidence=Attrs(median_ms=1.5))
PROBLEM = PLAN.problem


def of_other(**fields: Any) -> Plan:
    """The plan for another problem."""
    return replace(PLAN, problem=replace(PROBLEM, **fields))


FLIPS = 1500


SEARCHES_ALONE = stored.CONTENDERS_ONLY


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache and the shipped plans, both empty."""
    (tmp_path / "plans").mkdir()
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(stored, "data_folder", lambda name: tmp_path / name)
    # These tests ship plans for a CPU as for a GPU.
    monkeypatch.setattr(stored, "CONTENDERS_ONLY", ())


def put(plan: Plan, environment: Environment, *, partial: bool = False) -> Path:
    with PlanDatabase.open() as database:
        database.put_plan(plan, environment, partial=partial)
        assert database.path is not None
        return database.path


def ship(folder: Path, plan: Plan, environment: Environment) -> Path:
    path = folder / "plans" / f"{plan.problem.arch}.db"
    with PlanDatabase.in_memory() as database:
        database.put_plan(plan, environment)
        export_plans(database, path, plan.problem.arch)
    return path


def found() -> tuple[Plan, str] | None:
    result = find_stored_plan(PROBLEM, HERE)
    return None if result is None else (result.plan, result.match)


def test_without_any_database_there_is_no_plan_and_no_warning() -> None:
    assert found() is None


def test_what_is_shipped_for_cpus_is_for_searches_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(tmp_path, PLAN, THERE)
    assert found() is not None
    monkeypatch.setattr(stored, "CONTENDERS_ONLY", SEARCHES_ALONE)
    assert found() is None


def test_the_users_newest_complete_plan_is_found() -> None:
    put(OTHER, HERE)
    put(PLAN, HERE)
    put(OTHER, HERE, partial=True)
    assert found() == (PLAN, "exact")


def test_a_shipped_plan_is_found_where_the_user_has_none(tmp_path: Path) -> None:
    ship(tmp_path, PLAN, THERE)
    assert found() == (PLAN, "compatible")


def test_the_users_plan_comes_before_the_shipped_one(tmp_path: Path) -> None:
    ship(tmp_path, PLAN, THERE)
    put(OTHER, THERE)
    assert found() == (OTHER, "compatible")


def test_an_exact_match_comes_before_a_compatible_one(tmp_path: Path) -> None:
    ship(tmp_path, PLAN, HERE)
    put(OTHER, THERE)
    assert found() == (PLAN, "exact")


def test_a_plan_for_another_chip_is_marked_where_nothing_else_fits(tmp_path: Path) -> None:
    put(of_other(arch="sm90"), replace(HERE, arch="sm90"))
    result = find_stored_plan(PROBLEM, HERE)
    assert result is not None
    assert result.match == "foreign"
    ship(tmp_path, OTHER, THERE)
    assert found() == (OTHER, "compatible")


@pytest.mark.parametrize(
    "other", [{"batch": 9}, {"graph": "b" * 64}, {"mode": "train"}, {"dtype": "bfloat16"}]
)
def test_a_plan_for_another_problem_is_not_found(other: dict[str, object]) -> None:
    put(of_other(**other), HERE)
    assert found() is None


def test_a_database_can_be_named(tmp_path: Path) -> None:
    put(PLAN, HERE)
    with PlanDatabase.open(tmp_path / "mine.db") as database:
        database.put_plan(OTHER, HERE)
    result = find_stored_plan(PROBLEM, HERE, database=tmp_path / "mine.db")
    assert result is not None
    assert result.plan == OTHER


def test_a_changed_row_is_ignored_with_a_warning() -> None:
    path = put(PLAN, HERE)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE plans SET plan = replace(plan, 'nhwc', 'nchw')")
        connection.commit()
    with pytest.warns(DamagedRow, match="checksum"):
        assert found() is None


@pytest.mark.parametrize("content", [b"text" * 1000, b"SQLite format 3\0" + b"\1" * 4096])
def test_a_damaged_database_is_passed_over_with_one_warning(tmp_path: Path, content: bytes) -> None:
    path = put(PLAN, HERE)
    path.write_bytes(content)
    ship(tmp_path, OTHER, THERE)
    with pytest.warns(DatabaseWarning, match=r"plans\.db") as caught:
        assert found() == (OTHER, "compatible")
    assert len(caught) == 1
    assert path.read_bytes() == content


def test_a_folder_in_its_place_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "cache" / "plans.db").mkdir(parents=True)
    with pytest.warns(DatabaseWarning, match="cannot be read"):
        assert found() is None


@pytest.mark.parametrize("version", ["2", "999999999999", "one", ""])
def test_another_schema_is_passed_over(version: str) -> None:
    path = put(PLAN, HERE)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE meta SET value = ?", (version,))
        connection.commit()
    with pytest.warns(DatabaseWarning, match="schema 1 expected"):
        assert found() is None


def test_another_programs_database_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    with closing(sqlite3.connect(tmp_path / "cache" / "plans.db")) as connection:
        connection.execute("CREATE TABLE moz_places (id INTEGER)")
    with pytest.warns(DatabaseWarning, match="another program"):
        assert found() is None


def test_a_search_that_writes_is_not_waited_for() -> None:
    path = put(PLAN, HERE)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        assert found() == (PLAN, "exact")


def test_a_locked_database_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "WAIT_S", 0.05)
    path = put(PLAN, HERE)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        with pytest.warns(DatabaseWarning, match="locked"):
            assert found() is None


def test_one_flipped_byte_is_never_a_different_plan(tmp_path: Path) -> None:
    path = ship(tmp_path, PLAN, HERE)
    content = path.read_bytes()
    choice = random.Random(7)
    lost = 0
    for _ in range(FLIPS):
        flipped = bytearray(content)
        flipped[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
        with open(path, "r+b") as file:
            file.write(flipped)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DatabaseWarning)
            result = find_stored_plan(PROBLEM, HERE)
        assert result is None or (result.plan, result.environment) == (PLAN, HERE)
        lost += result is None
    assert 0 < lost < FLIPS


def test_the_runtime_does_not_load_the_database_library() -> None:
    script = (
        "import sys, plantune.plans.database.stored;"
        "sys.exit(any(name.split('.')[0] == 'sqlite_utils' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
