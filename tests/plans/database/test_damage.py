"""Damage costs time and never results: what does not match its checksum is not used.

The file is plantune's own, in its cache folder; see test_foreign_files.py for any other.
"""

from __future__ import annotations

import random
import sqlite3
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from plantune.base.outcome import Measured
from plantune.devices.machine import Environment
from plantune.errors import (
    DamagedDatabase,
    DamagedRow,
    DatabaseUnavailable,
    DatabaseWarning,
    InvalidDatabase,
)
from plantune.kernels.family import Candidate
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.rows import PLANS, TRIALS
from plantune.plans.plan import Plan

MEASURED = Measured(12.5, 12.0, 13.25, 40, 1e-6, 2e-6, deterministic=True)
FLIPS = 400
Change = Callable[[str], None]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path))


@pytest.fixture
def filled(path: Path, here: Environment, plan: Plan, candidate: Candidate) -> Path:
    """A database with a plan and a trial, closed."""
    with PlanDatabase.open(path) as database:
        database.put_plan(plan, here)
        database.put_trial("step", candidate, here, MEASURED)
    return path


def change(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(sql)
        connection.commit()


def aside(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.damaged-*"))


@pytest.mark.parametrize("column", [name for name in PLANS if name != "id"])
def test_a_changed_column_makes_a_plan_unusable(filled: Path, column: str) -> None:
    change(filled, f"UPDATE plans SET {column} = '0'")
    with PlanDatabase.open(filled) as database, pytest.warns(DamagedRow) as caught:
        assert database.plans() == ()
    assert len(caught) == 1
    assert "1 of the rows in plans cannot be used" in str(caught[0].message)


def test_a_plan_moved_to_another_id_is_unusable(filled: Path) -> None:
    change(filled, "UPDATE plans SET id = 7")
    with PlanDatabase.open(filled) as database, pytest.warns(DamagedRow, match="checksum"):
        assert database.plans() == ()


@pytest.mark.parametrize("column", [name for name in TRIALS if name not in ("step", "environment")])
def test_a_changed_column_makes_a_trial_unusable(
    filled: Path, here: Environment, column: str
) -> None:
    change(filled, f"UPDATE trials SET {column} = '7'")
    with PlanDatabase.open(filled) as database, pytest.warns(DamagedRow, match="1 of the rows"):
        assert database.trials("step", here) == {}


@pytest.mark.parametrize("value", ["NULL", "x'ff00'", "CAST(x'fffe' AS TEXT)", "9e999", "'{}'"])
def test_values_that_no_one_wrote_are_damage_and_no_error(
    filled: Path, here: Environment, value: str
) -> None:
    change(filled, f"UPDATE trials SET candidate = {value}, median_us = {value}")
    change(filled, f"UPDATE plans SET plan = {value}")
    with PlanDatabase.open(filled) as database:
        with pytest.warns(DamagedRow, match="in trials"):
            trials = database.trials("step", here)
        with pytest.warns(DamagedRow, match="in plans"):
            plans = database.plans()
    assert (trials, plans) == ({}, ())
    assert aside(filled) == []


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE environments SET json = replace(json, 'A CPU', 'B CPU')",
        "UPDATE environments SET device = 'B CPU'",
        "DELETE FROM environments",
    ],
)
def test_a_plan_without_its_environment_is_unusable(
    filled: Path, here: Environment, plan: Plan, sql: str
) -> None:
    change(filled, sql)
    fault = "its environment is missing or damaged"
    with PlanDatabase.open(filled) as database, pytest.warns(DamagedRow, match=fault):
        assert database.find_plan(plan.problem, here) is None


def test_a_damaged_environment_is_mended_by_the_next_write(
    filled: Path, here: Environment, plan: Plan
) -> None:
    change(filled, "UPDATE environments SET device = 'B CPU'")
    with PlanDatabase.open(filled) as database:
        with pytest.warns(DamagedRow, match="environments"):
            database.put_plan(plan, here)
        assert len(database.plans()) == 2


def test_good_rows_beside_a_damaged_one_are_used(
    filled: Path, here: Environment, plan: Plan
) -> None:
    with PlanDatabase.open(filled) as database:
        later = database.put_plan(plan, here)
        change(filled, f"UPDATE plans SET ratio = 0.1 WHERE id = {later}")
        with pytest.warns(DamagedRow):
            found = database.find_plan(plan.problem, here)
    assert found is not None
    assert (found.plan, found.id) == (plan, later - 1)


@pytest.mark.parametrize(
    "content",
    [b"some text, by accident\n" * 100, b"x", b"\0" * 4096, b"SQLite format 3\0" + b"\xff" * 5000],
    ids=["text", "one letter", "zeros", "header only"],
)
def test_what_is_not_a_database_is_moved_aside_whole(
    path: Path, here: Environment, plan: Plan, content: bytes
) -> None:
    path.write_bytes(content)
    with pytest.warns(DatabaseWarning, match="is damaged") as caught:
        database = PlanDatabase.open(path)
    with database:
        database.put_plan(plan, here)
    (kept,) = aside(path)
    assert kept.read_bytes() == content
    assert len(caught) == 1
    assert kept.name in str(caught[0].message)
    with PlanDatabase.open(path) as database:
        assert [stored.plan for stored in database.plans()] == [plan]


def test_files_moved_aside_in_the_same_second_are_all_kept(path: Path) -> None:
    for number in range(3):
        path.write_bytes(b"text %d" % number)
        with pytest.warns(DatabaseWarning):
            PlanDatabase.open(path).close()
    assert sorted(file.read_bytes() for file in aside(path)) == [b"text 0", b"text 1", b"text 2"]


def test_a_file_truncated_anywhere_is_used_whole_or_moved_aside(
    filled: Path, here: Environment, plan: Plan
) -> None:
    content = filled.read_bytes()
    for length in (1, 15, 16, 99, 100, 511, 4095, *range(4096, len(content), 4096), 9000):
        filled.write_bytes(content[:length])
        with pytest.warns(DatabaseWarning, match="is damaged"):
            database = PlanDatabase.open(filled)
        with database:
            assert database.plans() == ()
            database.put_plan(plan, here)


def test_an_empty_file_becomes_a_database(path: Path) -> None:
    path.touch()
    with PlanDatabase.open(path) as database:
        assert database.plans() == ()
    assert aside(path) == []


def test_a_damaged_file_opened_for_reading_stays_where_it_is(path: Path) -> None:
    path.write_text("some text, by accident")
    with pytest.raises(DamagedDatabase, match="not a database"):
        PlanDatabase.open(path, read_only=True)
    assert path.read_text() == "some text, by accident"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"CREATE TABLE", b"CREATE TABL\xc5"),
        (b'"median_ms" REAL', b'"median_m\xf3" REAL'),
        (b'"median_ms" REAL', b'"median_mt" REAL'),
        (b"plantune_schema", b"plantune_schemb"),
        (b"tableplansplans", b"tablePlansplans"),
        (b"tableplansplans", b"Tableplansplans"),
    ],
)
def test_a_damaged_schema_is_moved_aside(filled: Path, old: bytes, new: bytes) -> None:
    content = filled.read_bytes()
    assert old in content
    filled.write_bytes(content.replace(old, new))
    with pytest.raises(DamagedDatabase):
        PlanDatabase.open(filled, read_only=True)
    with pytest.warns(DatabaseWarning, match="is damaged"):
        PlanDatabase.open(filled).close()
    assert len(aside(filled)) == 1


def test_an_index_that_misleads_is_made_again(
    filled: Path, here: Environment, plan: Plan, candidate: Candidate
) -> None:
    # The table's rows lose their key while the indexes keep it.
    content = filled.read_bytes()
    key = here.key.encode()
    row = content.index(key + b"cpuA CPU")
    filled.write_bytes(content[:row] + b"0" + content[row + 1 :])
    with PlanDatabase.open(filled) as database:
        database.put_plan(plan, here)
        found = database.find_plan(plan.problem, here)
        assert found is not None
        assert found.plan == plan
    assert aside(filled) == []


def test_another_programs_database_is_refused_and_unchanged(path: Path) -> None:
    change(path, "CREATE TABLE moz_places (id INTEGER)")
    content = path.read_bytes()
    with pytest.raises(InvalidDatabase, match="another program"):
        PlanDatabase.open(path)
    assert path.read_bytes() == content


def test_one_flipped_byte_never_changes_a_result(
    filled: Path, here: Environment, plan: Plan, candidate: Candidate
) -> None:
    content = filled.read_bytes()
    choice = random.Random(24)
    lost = 0
    for position in sorted(choice.sample(range(len(content)), FLIPS)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << choice.randrange(8)
        for rest in filled.parent.iterdir():
            rest.unlink()
        filled.write_bytes(flipped)
        plans, trials = readable(filled, here)
        assert plans in ([plan], []), position
        assert trials in ({candidate: MEASURED}, {}), position
        lost += plans == []
    assert 0 < lost < FLIPS


def readable(path: Path, here: Environment) -> tuple[list[Plan], dict[object, object]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DatabaseWarning)
        try:
            with PlanDatabase.open(path) as database:
                plans = [stored.plan for stored in database.plans()]
                return plans, dict(database.trials("step", here))
        except DatabaseUnavailable:
            return [], {}
