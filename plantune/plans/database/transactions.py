"""Transactions that wait for each other, and SQLite's errors as plantune's."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlite_utils import Database

from plantune.errors import (
    DamagedDatabase,
    DatabaseFull,
    DatabaseLocked,
    DatabaseUnavailable,
    ReadOnlyDatabase,
)

_LOCKED = DatabaseLocked, "end the process that holds it, or try again later"
_DAMAGED = DamagedDatabase, "open it again: it will be checked"
_ERRORS: dict[int, tuple[type[DatabaseUnavailable], str]] = {
    sqlite3.SQLITE_FULL: (DatabaseFull, "make room or give another path"),
    sqlite3.SQLITE_IOERR: (DatabaseFull, "look at the disk, or give another path"),
    **dict.fromkeys((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED), _LOCKED),
    sqlite3.SQLITE_READONLY: (ReadOnlyDatabase, "make it writable or give another path"),
    **dict.fromkeys((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB), _DAMAGED),
    sqlite3.SQLITE_CANTOPEN: (DatabaseUnavailable, "give another path"),
}


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's result code without its details; 0 of an error that Python's module made."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


@contextmanager
def translated(place: object) -> Iterator[None]:
    """Raises DatabaseUnavailable for I/O errors; SQL errors propagate."""
    try:
        yield
    except UnicodeDecodeError as error:  # of a message or a name, which Python decodes by itself
        raise DamagedDatabase(f"{place}: its schema is damaged") from error
    except sqlite3.Error as error:
        known = _ERRORS.get(primary_code(error))
        if known is None:
            raise
        type_, advice = known
        raise type_(f"{place}: {error}; {advice}") from error


@contextmanager
def immediate(db: Database) -> Iterator[None]:
    """A transaction that holds the write lock from its start.

    `atomic()` alone begins deferred: where it reads before it writes, it fails at once, without
    waiting, when another process wrote in between.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        with db.atomic():
            yield
        db.commit()
    except BaseException:
        db.rollback()
        raise
