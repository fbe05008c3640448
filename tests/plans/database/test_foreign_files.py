"""A named file that is not a plan database is refused, and stays as it is byte for byte."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest

from plantune.devices.machine import Environment
from plantune.errors import ForeignFile, InvalidDatabase
from plantune.plans.database import recognition
from plantune.plans.database.exports import export_plans
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.plan import Plan

from ...permissions import obeyed

Make = Callable[[Path], object]


def foreign(path: Path, *commands: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for command in commands:
            connection.execute(command)
        connection.commit()


def foreign_with_log(path: Path) -> None:
    foreign(path, "PRAGMA journal_mode = WAL", "CREATE TABLE moz_places (id INTEGER)")


def killed_foreign(path: Path) -> None:
    """All that another program wrote is still in its log."""
    draft = path.with_name("draft")
    with closing(sqlite3.connect(draft)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE moz_places (id INTEGER)")
        connection.commit()
        for ending in ("", "-wal"):
            Path(f"{path}{ending}").write_bytes(Path(f"{draft}{ending}").read_bytes())
    draft.unlink()


def damaged_plans(path: Path) -> None:
    PlanDatabase.open(path).close()
    path.write_bytes(path.read_bytes()[:-4096])


FILES: dict[str, Make] = {
    "text": lambda path: path.write_text("notes that I need\n" * 100),
    "one letter": lambda path: path.write_bytes(b"x"),
    "zeros": lambda path: path.write_bytes(b"\0" * 4096),
    "half a header": lambda path: path.write_bytes(b"SQLite format 3\0" * 8),
    "header only": lambda path: path.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000),
    "another program's": lambda path: foreign(path, "CREATE TABLE moz_places (id INTEGER)"),
    "another program's with a log": foreign_with_log,
    "another program's, in its log only": killed_foreign,
    "another program's without tables": lambda path: foreign(path, "PRAGMA application_id = 7"),
    "a damaged plan database": damaged_plans,
}


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Names, contents and inodes: a file that was moved and written again would show."""
    return {file.name: (file.read_bytes(), file.stat().st_ino) for file in folder.iterdir()}


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("kind", FILES)
def test_it_is_refused_and_untouched(tmp_path: Path, kind: str, read_only: bool) -> None:
    path = tmp_path / "notes.txt"
    FILES[kind](path)
    before = snapshot(tmp_path)
    with pytest.raises(InvalidDatabase, match=r"notes\.txt: .*give another path"):
        PlanDatabase.open(path, read_only=read_only)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("read_only", [True, False])
def test_an_export_is_refused_and_untouched(exported: Path, read_only: bool) -> None:
    before = snapshot(exported.parent)
    with pytest.raises(InvalidDatabase, match="plantune import"):
        PlanDatabase.open(exported, read_only=read_only)
    assert snapshot(exported.parent) == before


@pytest.mark.parametrize("read_only", [True, False])
def test_what_a_link_leads_to_is_untouched(tmp_path: Path, read_only: bool) -> None:
    (tmp_path / "notes.txt").write_text("notes that I need")
    link = tmp_path / "plans.db"
    link.symlink_to("notes.txt")
    with pytest.raises(InvalidDatabase):
        PlanDatabase.open(link, read_only=read_only)
    assert (tmp_path / "notes.txt").read_text() == "notes that I need"
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "plans.db"]
    assert link.is_symlink()


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize(
    ("make", "what"), [(Path.mkdir, "a folder"), (os.mkfifo, "a pipe")], ids=["folder", "pipe"]
)
def test_what_is_not_a_file_is_refused_without_waiting(
    tmp_path: Path, read_only: bool, make: Make, what: str
) -> None:
    make(tmp_path / "mine")
    with pytest.raises(InvalidDatabase, match=f"it is {what}"):
        PlanDatabase.open(tmp_path / "mine", read_only=read_only)
    assert os.listdir(tmp_path) == ["mine"]


def test_a_file_without_permission_to_write_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("notes that I need")
    path.chmod(0o400)
    with obeyed(), pytest.raises(InvalidDatabase):
        PlanDatabase.open(path)


def test_a_named_plan_database_is_used(tmp_path: Path, here: Environment, plan: Plan) -> None:
    """Also where a killed writer left everything in the log."""
    path, copy = tmp_path / "mine.db", tmp_path / "copy.db"
    with PlanDatabase.open(path) as database:
        database.put_plan(plan, here)
        for ending in ("", "-wal"):
            Path(f"{copy}{ending}").write_bytes(Path(f"{path}{ending}").read_bytes())
    for place in (path, copy):
        with PlanDatabase.open(place) as database:
            assert [stored.plan for stored in database.plans()] == [plan]


def test_one_that_was_half_written_at_the_first_look_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process was making it, and has removed its journal since."""
    path, looks = tmp_path / "work.db", []
    PlanDatabase.open(path).close()

    def looked_into(path: Path) -> AbstractContextManager[sqlite3.Connection]:
        looks.append(path)
        if len(looks) == 1:
            raise sqlite3.DatabaseError("database disk image is malformed")
        return real(path)

    real = recognition.looked_into
    monkeypatch.setattr(recognition, "looked_into", looked_into)
    PlanDatabase.open(path).close()
    assert len(looks) == 2


def test_our_own_database_is_known_by_any_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to("cache")
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache" / "plans.db").write_text("no database at all")
    with pytest.warns(UserWarning, match="was moved to"):
        PlanDatabase.open(tmp_path / "link" / ".." / "cache" / "plans.db").close()


def test_an_export_replaces_exports_alone(tmp_path: Path, here: Environment, plan: Plan) -> None:
    with PlanDatabase.open(tmp_path / "mine.db") as database:
        database.put_plan(plan, here)
        export_plans(database, tmp_path / "cpu.db", "cpu")
        export_plans(database, tmp_path / "cpu.db", "cpu")
        foreign(tmp_path / "places.sqlite", "CREATE TABLE moz_places (id INTEGER)")
        PlanDatabase.open(tmp_path / "other.db").close()
        before = (tmp_path / "places.sqlite").read_bytes(), (tmp_path / "other.db").read_bytes()
        for name in ("places.sqlite", "other.db", "mine.db"):
            with pytest.raises(ForeignFile, match="give another path"):
                export_plans(database, tmp_path / name, "cpu")
        assert before == (
            (tmp_path / "places.sqlite").read_bytes(),
            (tmp_path / "other.db").read_bytes(),
        )


def test_a_log_that_vanishes_while_it_is_looked_at_is_in_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does when its last writer closes the file between two looks."""
    sqlite3.connect(path).execute("PRAGMA user_version = 7").connection.close()
    monkeypatch.setattr(recognition, "_has_log", lambda path: True)
    with recognition.looked_into(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (7,)
