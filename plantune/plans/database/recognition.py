"""Whether a file may be opened as the plan database at all: judged without changing anything.

A file that an option names stays as it is unless it is a plan database. Only plantune's own file,
in its own cache folder, is set aside if it is damaged.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from plantune.base.files import kind_of
from plantune.base.paths import database_path
from plantune.errors import InvalidDatabase
from plantune.plans.database.rows import MAGIC, SMALLEST_BYTES, connected, schema_version
from plantune.plans.database.soundness import is_export, is_known

SIDE_FILES = ("-wal", "-shm", "-journal")


def is_own(path: Path) -> bool:
    """Whether it is the user's database in plantune's cache folder, under whatever spelling."""
    own = database_path()
    return path.name == own.name and path.parent.resolve() == own.parent.resolve()


def require_own_kind(path: Path) -> None:
    """Raises InvalidDatabase unless the file is a plan database, or missing or empty.

    In the cache folder, plantune's own file may also be damaged. Writes nothing and waits for
    nothing: side files are neither made nor removed.
    """
    fault = why_no_database(path)
    if fault is not None and not is_own(path):
        raise refused(path, fault)
    if fault is None and os.path.exists(path) and os.path.getsize(path):
        _require_tables(path)


def refused(path: Path, fault: str) -> InvalidDatabase:
    return InvalidDatabase(
        f"{path}: is not a usable plan database ({fault}) and was left as it is; give another path"
    )


def why_no_database(path: Path) -> str | None:
    """Why a file cannot be a database of SQLite, as far as its first bytes tell."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None  # missing, or what opening it says
    if not stat.S_ISREG(mode):
        return f"it is {kind_of(mode)}"
    try:
        with open(path, "rb") as file:
            head = file.read(SMALLEST_BYTES)
    except OSError:
        return None
    if head and not head.startswith(MAGIC):
        return "file is not a database"
    if 0 < len(head) < SMALLEST_BYTES:
        return "file is too short"  # SQLite would take it for empty and write over it
    return None


def _require_tables(path: Path) -> None:
    """Raises InvalidDatabase for sound databases of others, and for damaged ones that are named."""
    try:
        known = _is_known(path)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        if is_own(path) or is_in_use(path):
            return  # somebody may be writing at this moment: locks decide
        raise refused(path, str(error)) from error
    if not known:
        raise InvalidDatabase(f"{path}: is a database of another program; give another path")


def _is_known(path: Path, tries: int = 3) -> bool:
    """Whether its tables are those of plans. A broken file is read again: it may have been half
    written, and whoever makes the database may have removed the journal that would show it.
    """
    try:
        with looked_into(path) as connection:
            if is_export(connection):
                raise InvalidDatabase(
                    f"{path}: holds exported plans, which cannot be edited; `plantune import` "
                    "takes them into a database"
                )
            return is_known(connection)
    except sqlite3.DatabaseError:
        if tries == 1 or is_in_use(path):
            raise
    return _is_known(path, tries - 1)


@contextmanager
def looked_into(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that leaves no trace. What a killed writer left in a log counts if it is all."""
    uri = path.absolute().as_uri()
    with closing(connected(f"{uri}?mode=ro&immutable=1")) as connection:
        if schema_version(connection) != 0 or not _has_log(path):
            yield connection
            return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.db"
        shutil.copyfile(path, copy)
        try:
            shutil.copyfile(f"{path}-wal", f"{copy}-wal")
        except FileNotFoundError:  # its last writer has put it into the file meanwhile
            shutil.copyfile(path, copy)
        with closing(connected(f"{copy.as_uri()}?mode=rw")) as connection:
            yield connection


def is_in_use(path: Path) -> bool:
    """Whether another process may be writing now."""
    return any(os.path.exists(f"{path}{ending}") for ending in SIDE_FILES)


def _has_log(path: Path) -> bool:
    log = Path(f"{path}-wal")
    return log.is_file() and log.stat().st_size > 0
