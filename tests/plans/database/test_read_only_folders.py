"""Plans in a folder that cannot be written are read, whatever state they were left in."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from plantune.base.files import write_whole
from plantune.devices.machine import Environment
from plantune.errors import PlantuneError
from plantune.plans.database.exports import export_plans
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.plan_file import PlanFile, read_plan_file
from plantune.plans.database.stored import find_stored_plan
from plantune.plans.plan import Plan

NOBODY = 65534


@pytest.fixture
def folder(here: Environment, plan: Plan) -> Iterator[Path]:
    """With plans in each form, read by a user who cannot write there."""
    made = Path(tempfile.mkdtemp())
    with PlanDatabase.open(made / "working.db") as database:
        database.put_plan(plan, here)
        export_plans(database, made / "exported.db", "cpu")
    _as_a_killed_writer_leaves_it(made / "working.db", made / "killed.db")
    made.chmod(0o555)
    user = os.geteuid()
    if user == 0:  # to whom nothing is read-only
        os.seteuid(NOBODY)
    yield made
    os.seteuid(user)
    made.chmod(0o755)
    shutil.rmtree(made)


def _as_a_killed_writer_leaves_it(working: Path, killed: Path) -> None:
    """What it changed last is in the log alone."""
    with closing(sqlite3.connect(working)) as connection:
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("INSERT INTO meta VALUES ('last', 'change')")
        connection.commit()
        for ending in ("", "-wal"):
            shutil.copyfile(f"{working}{ending}", f"{killed}{ending}")


@pytest.mark.parametrize("name", ["working.db", "exported.db", "killed.db"])
def test_a_plan_file_there_is_read(folder: Path, here: Environment, plan: Plan, name: str) -> None:
    before = sorted(os.listdir(folder))
    given = read_plan_file(folder / name)
    assert isinstance(given, PlanFile)
    assert given.plan_for(plan.problem, here) == plan
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("name", ["working.db", "killed.db"])
def test_a_database_there_is_read(folder: Path, here: Environment, plan: Plan, name: str) -> None:
    found = find_stored_plan(plan.problem, here, database=folder / name)
    assert found is not None
    assert found.plan == plan
    with PlanDatabase.open(folder / name, read_only=True) as database:
        assert [stored.plan for stored in database.plans()] == [plan]


def _export(place: Path) -> object:
    with PlanDatabase.open(place.with_name("working.db"), read_only=True) as database:
        return export_plans(database, place, "cpu")


@pytest.mark.parametrize(
    "write", [_export, lambda path: write_whole(path, b"{}")], ids=["export", "whole"]
)
@pytest.mark.parametrize("name", ["new.db", "exported.db"])
def test_what_cannot_be_written_there_is_said_and_nothing_changes(
    folder: Path, write: Callable[[Path], object], name: str
) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises((PlantuneError, PermissionError), match=str(folder / name)):
        write(folder / name)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
