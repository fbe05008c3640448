"""Plan files that others share, on a network file system too: read whole, as a copy.

So nothing is locked, nothing is written beside them, and SQLite maps no memory of a network's.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from plantune.base.files import read_regular
from plantune.errors import ForeignFile, InvalidPlan
from plantune.plans.database import rows
from plantune.plans.database.missing_families import with_known_families

T = TypeVar("T")
SIZE_LIMIT_BYTES = 256 << 20
# The header bytes that say how a file is written: 2 means with a log next to it, 1 without.
WRITTEN, LOG, NO_LOG = slice(18, 20), b"\2\2", b"\1\1"
# Exceptions from reading such a file.
FAULTS = (sqlite3.Error, OSError, LookupError, ValueError, ForeignFile, InvalidPlan)
EXPECTED = "give a file that `plantune export` or `plantune plans merge` wrote"


def plans_of(path: Path) -> list[rows.StoredPlan]:
    """The plans of a file whose kernel families are here, the newest first; raises one of FAULTS if
    it cannot be read.
    """
    stored = from_file(path, lambda connection: rows.read_plans(connection, {}))
    return with_known_families(stored, str(path))


def from_file(path: Path, read: Callable[[sqlite3.Connection], T]) -> T:
    """What `read` finds in a plan file; raises one of FAULTS."""
    with _copied(path) as connection:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA query_only = ON")
        fault = why_no_plans(connection)
        if fault is not None:
            raise InvalidPlan(f"{fault}; {EXPECTED}")
        return read(connection)


def why_no_plans(connection: sqlite3.Connection) -> str | None:
    """Why a database is not a plan database of this schema: it may hold what a plan database never
    has, such as views, which would run when they are read.
    """
    query = "SELECT count(*) FROM sqlite_schema WHERE type NOT IN ('table', 'index')"
    odd = connection.execute(query + " OR sql LIKE 'CREATE VIRTUAL%'").fetchone()[0]
    version = rows.schema_version(connection)
    if not odd and version == rows.SCHEMA_VERSION:
        return None
    got = "that of another program" if odd or not version else version
    return f"schema {rows.SCHEMA_VERSION} expected, got {got}"


@contextmanager
def _copied(path: Path) -> Iterator[sqlite3.Connection]:
    """A copy of a database in memory, or of one that is being worked in, with the log beside it, in
    a folder of its own. What was torn by a writer fails its checksum.
    """
    content = read_regular(path, SIZE_LIMIT_BYTES)
    if not content.startswith(rows.MAGIC) or len(content) < rows.SMALLEST_BYTES:
        raise InvalidPlan(f"is not a plan database; {EXPECTED}")
    log = Path(f"{path}-wal")
    if content[WRITTEN] == LOG and os.path.lexists(log):
        with tempfile.TemporaryDirectory(prefix="plantune-") as folder:
            copy = Path(folder) / "plans.db"
            copy.write_bytes(content)
            Path(f"{copy}-wal").write_bytes(read_regular(log, SIZE_LIMIT_BYTES))
            with closing(rows.connected(f"{copy.as_uri()}?mode=rw")) as connection:
                yield connection
        return
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.text_factory = rows.lenient_text
        without = NO_LOG if content[WRITTEN] == LOG else content[WRITTEN]
        connection.deserialize(content[: WRITTEN.start] + without + content[WRITTEN.stop :])
        yield connection
