"""Optuna's file, whatever became of it, stops no search."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import optuna
import pytest
import sqlalchemy

from plantune.cli.storage import is_damaged, storage_for
from plantune.errors import InvalidDatabase
from plantune.search.studies import Studies, opened, storage_url

DAMAGE = {
    "text": b"no database at all " * 100,
    "header only": b"SQLite format 3\0" + b"\xff" * 5000,
}


@pytest.fixture
def place(cache: Path) -> Path:
    """The path of the user's plan database; Optuna's file lies beside it."""
    cache.mkdir()
    return cache / "plans.db"


def studies(url: str) -> list[str]:
    return optuna.get_all_study_names(opened(url))


def test_it_is_beside_the_plan_database(place: Path) -> None:
    url = storage_for(None, place, 0)
    assert url == storage_url(place.with_name("optuna.db"))
    assert studies(url) == []
    assert place.with_name("optuna.db").is_file()


def test_without_a_file_for_plans_there_is_none_for_trials() -> None:
    assert storage_for(None, None, 0) is None


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_set_aside_and_a_new_one_used(
    place: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place.with_name("optuna.db")
    path.write_bytes(DAMAGE[kind])
    url = storage_for(None, place, 0)
    assert url == storage_url(path)
    assert studies(url) == []
    (aside,) = place.parent.glob("optuna.db.damaged-*")
    assert aside.read_bytes() == DAMAGE[kind]
    assert f"It was moved to {aside.name}" in capsys.readouterr().err
    assert storage_for(None, place, 0) == url
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", DAMAGE)
def test_beside_a_named_database_nothing_is_moved(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Optuna's file there is named after the database: another `optuna.db` may be the user's."""
    path = tmp_path / "mine.optuna.db"
    path.write_bytes(DAMAGE[kind])
    (tmp_path / "optuna.db").write_bytes(b"mine")
    assert storage_for(None, tmp_path / "mine.db", 0) is None
    assert path.read_bytes() == DAMAGE[kind]
    assert (tmp_path / "optuna.db").read_bytes() == b"mine"
    files = [file.name for file in tmp_path.iterdir() if file.is_file()]
    assert sorted(files) == ["mine.optuna.db", "optuna.db"]
    assert "its trials are kept in memory" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [*DAMAGE, "another program's"])
def test_a_named_file_of_another_program_is_refused_and_untouched(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "places.sqlite"
    if kind in DAMAGE:
        path.write_bytes(DAMAGE[kind])
    else:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE moz_places (id INTEGER)")
    content = path.read_bytes()
    with pytest.raises(InvalidDatabase, match=r"not a storage of Optuna.*--storage"):
        storage_for(f"sqlite:///{path}", None, 0)
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["places.sqlite"]


def test_a_named_storage_of_optuna_is_used(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'mine.sqlite'}"
    optuna.create_study(storage=opened(url), study_name="mine")
    assert storage_for(url, None, 0) == url
    assert studies(url) == ["mine"]


def test_a_file_that_is_sound_stays_where_it_is(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another program's tables are none of Optuna's, and no damage."""
    path = place.with_name("optuna.db")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE version_info (moz_places TEXT)")
        connection.commit()
    assert storage_for(None, place, 0) is None
    assert b"moz_places" in path.read_bytes()
    assert [file.name for file in place.parent.iterdir()] == ["optuna.db"]
    assert "its trials are kept in memory" in capsys.readouterr().err


def test_what_is_locked_or_missing_is_not_judged(place: Path) -> None:
    path = place.with_name("optuna.db")
    assert not is_damaged(path)
    assert storage_for(None, place, 0) is not None
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        assert not is_damaged(path)


@pytest.mark.parametrize("name", ["a?b", "50%20", "#1", "ä ü", "a&b=c"])
def test_odd_paths_are_paths(tmp_path: Path, name: str) -> None:
    """What is special in a URL is none of that here."""
    folder = tmp_path / name
    folder.mkdir()
    url = storage_for(None, folder / "plans.db", 0)
    assert url is not None
    optuna.create_study(storage=opened(url), study_name="here")
    assert [file.name for file in folder.iterdir()] == ["plans.optuna.db"]
    assert name in [file.name for file in tmp_path.iterdir()]


@pytest.mark.parametrize("url", ["mine.db", "nosuchdatabase://x", "sqlite:////no/such/folder/x.db"])
def test_a_named_one_that_does_not_open_is_wrong_usage(place: Path, url: str) -> None:
    with pytest.raises(click.BadParameter, match="'"):
        storage_for(url, place, 0)


REFUSED = {
    "postgresql": sqlalchemy.exc.IntegrityError("CREATE", {}, Exception("duplicate key value")),
    "mysql": sqlalchemy.exc.OperationalError("CREATE", {}, Exception("1050 'x' already exists")),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_tables_that_another_search_makes_at_the_same_time_are_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Two that began in the same second ended with "Invalid value for --storage"."""
    real, errors = Studies.__init__, [REFUSED[refused]]

    def refuses_once(self: Studies, *arguments: Any, **named: Any) -> None:
        if errors:
            raise errors.pop()
        real(self, *arguments, **named)

    monkeypatch.setattr(Studies, "__init__", refuses_once)
    url = storage_url(place.with_name("shared.db"))
    assert storage_for(url, place, 0) == url
    assert studies(url) == []


def test_what_a_database_always_refuses_is_said(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self: Studies, *arguments: Any) -> None:
        raise sqlalchemy.exc.ProgrammingError("CREATE", {}, Exception("permission denied"))

    monkeypatch.setattr(Studies, "__init__", refuses)
    monkeypatch.setattr("plantune.cli.storage.AGAIN_S", 0.0)
    with pytest.raises(click.BadParameter, match="permission denied"):
        storage_for(storage_url(place.with_name("shared.db")), place, 0)
