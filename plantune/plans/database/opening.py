"""Opens the database's file, whatever state it is in: missing, locked, old, newer or damaged."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlite_utils import Database

from plantune import errors
from plantune.base.paths import is_said
from plantune.base.warning import warn
from plantune.plans.database.migrations import migrate, put_index
from plantune.plans.database.mounts import network_file_system
from plantune.plans.database.recognition import SIDE_FILES, is_own, refused, require_own_kind
from plantune.plans.database.rows import (
    SCHEMA_VERSION,
    SMALLEST_BYTES,
    connect_read_only,
    lenient_text,
    schema_version,
)
from plantune.plans.database.soundness import fault_of
from plantune.plans.database.transactions import immediate, primary_code, translated


@dataclass(frozen=True)
class Opened:
    """A database with the current schema, and whether it may be written."""

    db: Database
    read_only: bool


def now_text() -> str:
    """The time in UTC, to be shown and never to be calculated with."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def open_database(path: Path, *, read_only: bool, timeout_s: float) -> Opened:
    """Opens or makes the database; each thing that is not as it should be is warned of once.

    Raises NewerSchema and InvalidDatabase without having written anything. A damaged file is set
    aside if it is plantune's own, in its cache folder, and refused everywhere else.
    """
    require_own_kind(path)
    if read_only:
        return _open_read_only(path, timeout_s)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _handle_damage(path, timeout_s)
        return Opened(_open_writable(path, timeout_s), False)
    except errors.DamagedDatabase:
        raise
    except (OSError, errors.DatabaseUnavailable) as error:
        return _instead_of_writable(path, error, timeout_s)


def _instead_of_writable(path: Path, reason: Exception, timeout_s: float) -> Opened:
    try:
        if os.path.isfile(path):
            opened = _open_read_only(path, timeout_s)
            if not (is_own(path) and is_said()):
                _warn(f"{path}: is open for reading only: {reason}")
            return opened
    except errors.DatabaseLocked:
        raise
    except errors.DatabaseUnavailable:
        pass
    if not (is_own(path) and is_said()):
        kept = "results are kept in memory until the process ends"
        _warn(f"{path}: cannot be used, {kept}: {reason}")
    return in_memory()


def in_memory(content: sqlite3.Connection | None = None, *, read_only: bool = False) -> Opened:
    """An empty database, or one with this content, brought up to date."""
    db = _wrapped(sqlite3.connect(":memory:"))
    if content is not None:
        with closing(content):
            content.backup(db.conn)
    with immediate(db):
        migrate(db)
        put_index(db)
    return Opened(db, read_only)


def _open_writable(path: Path, timeout_s: float) -> Database:
    with _closed_on_error(path, timeout_s) as db:
        version = _require_version(path, db.conn)
        if 0 < version < SCHEMA_VERSION:
            _back_up(path, db.conn, version)
        _prepare_for_writers(path, db, timeout_s)
        with immediate(db):  # waits for other writers, so that a lasting lock shows here
            if schema_version(db.conn) != SCHEMA_VERSION:
                migrate(db)
            put_index(db)
        return db


def _open_read_only(path: Path, timeout_s: float) -> Opened:
    if not os.path.exists(path):
        return in_memory(read_only=True)
    with translated(path):
        connection = connect_read_only(path, timeout_s)
        try:
            fault = fault_of(connection)
            if fault is not None:
                raise _damaged(path, fault)
            if _require_version(path, connection) < SCHEMA_VERSION:
                return in_memory(connection, read_only=True)
        except BaseException:
            connection.close()
            raise
        return Opened(_wrapped(connection), True)


def _damaged(path: Path, fault: str) -> errors.PlantuneError:
    if not is_own(path):
        return refused(path, f"it is damaged: {fault}")
    return errors.DamagedDatabase(f"{path}: {fault}; open it for writing: it will be set aside")


def _connect(path: Path, timeout_s: float) -> sqlite3.Connection:
    uri = path.absolute().as_uri() + "?mode=rwc"
    return sqlite3.connect(uri, uri=True, timeout=timeout_s)


def _wrapped(connection: sqlite3.Connection) -> Database:
    connection.text_factory = lenient_text
    return Database(connection, execute_plugins=False)


@contextmanager
def _closed_on_error(path: Path, timeout_s: float) -> Iterator[Database]:
    with translated(path):
        db = _wrapped(_connect(path, timeout_s))
        try:
            yield db
        except BaseException:
            db.close()
            raise


def _require_version(path: Path, connection: sqlite3.Connection) -> int:
    version = schema_version(connection)
    if version is None:
        raise errors.InvalidDatabase(f"{path}: is a database of another program; give another path")
    if version > SCHEMA_VERSION:
        raise errors.NewerSchema(
            f"{path}: was written by a later plantune: schema {SCHEMA_VERSION} expected, got "
            f"{version}; install that plantune, or give another path",
            SCHEMA_VERSION,
            version,
        )
    return version


def _prepare_for_writers(path: Path, db: Database, timeout_s: float) -> None:
    db.execute("PRAGMA synchronous = NORMAL")
    kind = network_file_system(path)
    if kind is not None:
        _warn(
            f"{path}: is on a network file system ({kind}), where SQLite's locks may fail; "
            "set PLANTUNE_CACHE_DIR to a local folder."
        )
        return
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            db.enable_wal()
            return
        except sqlite3.OperationalError as error:
            # Another process is switching at this moment; SQLite does not wait for that itself.
            if primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _back_up(path: Path, connection: sqlite3.Connection, version: int) -> None:
    copy = dated(path, f"schema-{version}")
    with closing(sqlite3.connect(copy)) as target:
        connection.backup(target)
    _warn(f"{path}: its schema {version} was brought up to {SCHEMA_VERSION}; {copy} is as before.")


def _handle_damage(path: Path, timeout_s: float) -> None:
    """Moves plantune's own damaged file, with the files that belong to it; refuses any other."""
    if not os.path.exists(path):
        return
    fault = _why_damaged(path, timeout_s)
    if fault is None:
        return
    if not is_own(path):
        raise _damaged(path, fault)
    with _folder_lock(path.parent):
        fault = _why_damaged(path, timeout_s)  # another process may have been first
        if fault is None:
            return
        aside = dated(path, "damaged")
        for ending in (*SIDE_FILES, ""):
            if os.path.exists(f"{path}{ending}"):
                os.rename(f"{path}{ending}", f"{aside}{ending}")
    _warn(f"{path}: is damaged ({fault}). It was moved to {aside.name}, and a new one is used.")


def _why_damaged(path: Path, timeout_s: float) -> str | None:
    if not path.is_file():
        raise errors.DatabaseUnavailable(f"{path}: is not a regular file; give another path")
    if 0 < os.path.getsize(path) < SMALLEST_BYTES:
        return "file is too short"  # SQLite would take it for empty and write over it
    with translated(path), closing(_connect(path, timeout_s)) as connection:
        return fault_of(connection, mend=True)


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def dated(path: Path, word: str) -> Path:
    """A name beside `path` that no file has."""
    base = path.with_name(f"{path.name}.{word}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    number, name = 1, base
    while os.path.lexists(name):
        number += 1
        name = base.with_name(f"{base.name}-{number}")
    return name


def _warn(message: str) -> None:
    warn(message, errors.DatabaseWarning)
