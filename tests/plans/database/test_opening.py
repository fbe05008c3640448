"""The database opens in whatever state its file is, or says why it does not."""

from __future__ import annotations

import os
import sqlite3
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from plantune.base.outcome import Measured
from plantune.devices.machine import Environment
from plantune.errors import (
    DatabaseFull,
    DatabaseLocked,
    DatabaseWarning,
    NewerSchema,
    ReadOnlyDatabase,
)
from plantune.kernels.family import Candidate
from plantune.plans.database import migrations, mounts, opening
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.rows import SCHEMA_VERSION, connect_read_only
from plantune.plans.plan import Plan

from ...permissions import write_protected

DATA = Path(__file__).parent / "data"


@contextmanager
def locked(path: Path, how: str = "IMMEDIATE") -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"BEGIN {how}")
        yield
        connection.execute("ROLLBACK")


@contextmanager
def released_soon(path: Path) -> Iterator[None]:
    """Locked when the block begins, until another thread gives the lock back."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.2, connection.execute, ("ROLLBACK",))
    release.start()
    yield
    release.join()
    connection.close()


def test_the_users_database_is_in_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "cache"))
    with PlanDatabase.open() as database:
        assert database.path == tmp_path / "cache" / "plans.db"
        assert database.path.is_file()


def test_writers_append_to_a_log_so_that_readers_go_on(path: Path) -> None:
    PlanDatabase.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("place", ["file/plans.db", "file/sub/plans.db"])
def test_where_nothing_can_be_written_the_process_remembers(
    tmp_path: Path, here: Environment, plan: Plan, place: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(DatabaseWarning, match="kept in memory") as caught:
        database = PlanDatabase.open(tmp_path / place)
    assert len(caught) == 1
    with database:
        database.put_plan(plan, here)
        assert [stored.plan for stored in database.plans()] == [plan]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_where_something_else_has_the_name_of_our_own_the_process_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path))
    make(tmp_path / "plans.db")
    with pytest.warns(DatabaseWarning, match="kept in memory"), PlanDatabase.open() as database:
        assert database.plans() == ()
    assert os.listdir(tmp_path) == ["plans.db"]


def test_without_a_home_or_a_cache_one_warning_is_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Environment, plan: Plan
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with PlanDatabase.open() as database:
            database.put_plan(plan, here)
            assert [stored.plan for stored in database.plans()] == [plan]
    assert len(caught) <= 1  # none where an earlier test of this process had the warning already


def test_a_file_that_cannot_be_written_is_read(path: Path, here: Environment, plan: Plan) -> None:
    with PlanDatabase.open(path) as database:
        database.put_plan(plan, here)
    with write_protected(path.parent):
        with pytest.warns(DatabaseWarning, match="open for reading only"):
            database = PlanDatabase.open(path)
        with database:
            assert [stored.plan for stored in database.plans()] == [plan]


def test_a_short_lock_is_waited_for(path: Path, here: Environment, plan: Plan) -> None:
    """By the open and by a write, each of which begins while the file is locked."""
    PlanDatabase.open(path).close()
    with released_soon(path), PlanDatabase.open(path, timeout_s=60) as database:
        with released_soon(path):
            database.put_plan(plan, here)
        with PlanDatabase.open(path) as other:
            assert len(other.plans()) == 1


def test_a_lasting_lock_leaves_a_database_to_read(
    path: Path, here: Environment, plan: Plan
) -> None:
    with PlanDatabase.open(path) as database:
        database.put_plan(plan, here)
    with locked(path):
        with pytest.warns(DatabaseWarning, match="open for reading only: .*locked"):
            database = PlanDatabase.open(path, timeout_s=0.3)
        with database:
            assert [stored.plan for stored in database.plans()] == [plan]
            with pytest.raises(ReadOnlyDatabase):
                database.put_plan(plan, here)


def test_a_lock_that_comes_later_is_an_error_the_search_can_catch(
    path: Path, here: Environment, plan: Plan
) -> None:
    with PlanDatabase.open(path, timeout_s=0.2) as database:
        with locked(path), pytest.raises(DatabaseLocked, match="try again later"):
            database.put_plan(plan, here)
        database.put_plan(plan, here)
        assert len(database.plans()) == 1


def test_where_not_even_reading_is_possible_it_is_said(path: Path) -> None:
    PlanDatabase.open(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        with pytest.raises(DatabaseLocked, match="locked"):
            PlanDatabase.open(path, timeout_s=0.1)


def test_a_full_disk_keeps_what_was_committed(
    database: PlanDatabase, here: Environment, candidate: Candidate, plan: Plan
) -> None:
    outcome = Measured(1.0, 1.0, 1.0, 1, 0.0, 0.0, True)
    database.put_plan(plan, here)
    pages = database._db.execute("PRAGMA page_count").fetchone()[0]
    database._db.execute(f"PRAGMA max_page_count = {pages + 2}")
    kept = {}

    def fill() -> None:
        for number in range(1000):
            tried = Candidate(f"f{number}", candidate.config)
            database.put_trial("step" * 99, tried, here, outcome)
            kept[tried] = outcome

    with pytest.raises(DatabaseFull, match="make room"):
        fill()
    assert len(kept) > 0
    assert database.trials("step" * 99, here) == kept
    database._db.execute(f"PRAGMA max_page_count = {pages + 1000}")
    database.put_trial("step" * 99, Candidate("after", candidate.config), here, outcome)
    assert len(database.trials("step" * 99, here)) == len(kept) + 1


def test_a_newer_schema_is_refused_and_unchanged(path: Path) -> None:
    PlanDatabase.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE meta SET value = ?", (str(SCHEMA_VERSION + 1),))
        connection.commit()
    content = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(NewerSchema, match="later plantune") as caught:
            PlanDatabase.open(path, read_only=read_only)
        assert (caught.value.expected, caught.value.got) == (SCHEMA_VERSION, SCHEMA_VERSION + 1)
    assert path.read_bytes() == content


@pytest.fixture
def next_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this plantune had one more migration than the release before it."""
    history = migrations.Migrations("plantune")
    history()(migrations.m001_tables)

    @history()
    def m_next(db: opening.Database) -> None:
        db.table("plans").add_column("later", str)

    monkeypatch.setattr(migrations, "migrations", history)
    for module in (migrations.rows, opening):
        monkeypatch.setattr(module, "SCHEMA_VERSION", SCHEMA_VERSION + 1)


def schema_of(path: Path) -> tuple[int | None, bool]:
    with closing(connect_read_only(path, 1.0)) as connection:
        columns = {row[1] for row in connection.execute("PRAGMA table_info(plans)")}
        return opening.schema_version(connection), "later" in columns


def test_an_older_schema_is_backed_up_and_migrated(
    path: Path, request: pytest.FixtureRequest
) -> None:
    PlanDatabase.open(path).close()
    request.getfixturevalue("next_schema")
    with pytest.warns(DatabaseWarning, match="brought up to"):
        PlanDatabase.open(path).close()
    (backup,) = path.parent.glob(f"{path.name}.schema-{SCHEMA_VERSION}-*")
    assert schema_of(backup) == (SCHEMA_VERSION, False)
    assert schema_of(path) == (SCHEMA_VERSION + 1, True)


def test_an_older_schema_is_read_without_changing_the_file(
    path: Path, request: pytest.FixtureRequest
) -> None:
    PlanDatabase.open(path).close()
    request.getfixturevalue("next_schema")
    with PlanDatabase.open(path, read_only=True) as database:
        assert database.plans() == ()
    assert schema_of(path) == (SCHEMA_VERSION, False)


def test_a_migration_that_fails_leaves_the_database_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    PlanDatabase.open(path).close()
    request.getfixturevalue("next_schema")

    def fail(db: opening.Database) -> None:
        raise RuntimeError("the power went")

    monkeypatch.setattr(migrations, "put_version", fail)
    with pytest.warns(DatabaseWarning), pytest.raises(RuntimeError, match="the power went"):
        PlanDatabase.open(path)
    assert schema_of(path) == (SCHEMA_VERSION, False)


@pytest.mark.parametrize("dump", sorted(DATA.glob("schema_*.sql")), ids=lambda dump: dump.stem)
def test_databases_of_earlier_releases_still_open(
    path: Path, dump: Path, here: Environment, plan: Plan, candidate: Candidate
) -> None:
    # A dump is made when a schema is released: sqlite3 plans.db .dump. This plan is from
    # before calls were kept.
    earlier = replace(plan, problem=plan.problem.key)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(dump.read_text(encoding="utf-8"))
    with PlanDatabase.open(path) as database:
        assert [(item.plan, item.environment) for item in database.plans()] == [(earlier, here)]
        measured = Measured(12.5, 12.0, 13.25, 40, 1e-6, 2e-6, deterministic=True)
        assert database.trials("step", here) == {candidate: measured}


def test_every_schema_has_a_dump() -> None:
    names = {f"schema_{version}.sql" for version in range(1, SCHEMA_VERSION + 1)}
    assert {dump.name for dump in DATA.glob("*.sql")} == names


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    table = tmp_path / "mounts"
    share = str(tmp_path / "a share").replace(" ", r"\040")
    table.write_text(
        f"/dev/sda / ext4 rw 0 0\nserver:/x {share} nfs4 rw 0 0\n"
        f"tmpfs {share}/local tmpfs rw 0 0\nbroken\n"
    )
    monkeypatch.setattr(mounts, "MOUNTS", table)
    return tmp_path


def test_a_network_file_system_is_warned_of_and_no_shared_memory_is_used(
    mounted: Path, here: Environment, plan: Plan
) -> None:
    path = mounted / "a share" / "plans.db"
    with pytest.warns(DatabaseWarning, match=r"network file system \(nfs4\)"):
        database = PlanDatabase.open(path)
    with database:
        database.put_plan(plan, here)
        assert database._db.journal_mode == "delete"


@pytest.mark.parametrize("folder", ["", "a share/local", "a shared folder"])
def test_a_local_file_system_is_not_warned_of(mounted: Path, folder: str) -> None:
    assert mounts.network_file_system(mounted / folder / "plans.db") is None


def test_without_a_table_of_mounts_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "none")
    assert mounts.network_file_system(tmp_path) is None
