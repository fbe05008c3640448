"""Whether a file is a sound database: its pages, its schema and its indexes.

Single rows are not judged here: their checksums do that, and one bad row is not a reason to
set a whole file aside.
"""

from __future__ import annotations

import sqlite3

from plantune.plans.database.migrations import TABLES
from plantune.plans.database.rows import SCHEMA_VERSION, lenient_text, schema_version
from plantune.plans.database.transactions import primary_code

# The tables of an exported file.
EXPORTED = {"meta", "environments", "plans"}
# Errors that a correct statement raises only on a damaged file.
_DAMAGE = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CONSTRAINT,
)


def fault_of(connection: sqlite3.Connection, *, mend: bool = False) -> str | None:
    """What is wrong with the file, or None; None too of another program's.

    With `mend` the indexes are looked at too, and made again from the rows where they are wrong.
    """
    connection.text_factory = lenient_text
    try:
        version = schema_version(connection)
        if version is None:
            return _fault_of_unversioned(connection)
        fault = _fault_of_pages(connection, "integrity_check" if mend else "quick_check")
        if fault is not None and " index " in fault:
            fault = _fault_after_mending(connection)
        return fault or (_fault_of_columns(connection) if version == SCHEMA_VERSION else None)
    except UnicodeDecodeError:  # Python's module decodes names and messages by itself
        return "its schema is damaged"
    except sqlite3.DatabaseError as error:
        if primary_code(error) not in _DAMAGE:
            raise
        return str(error)


def _fault_after_mending(connection: sqlite3.Connection) -> str | None:
    """The fault that making the indexes again leaves; if it leaves one, nothing is changed."""
    connection.execute("BEGIN IMMEDIATE")
    fault: str | None = "its indexes cannot be made again"
    try:
        connection.execute("REINDEX")
        if schema_version(connection) is None:  # an index alone still knew it
            fault = _fault_of_unversioned(connection) or "its version cannot be read"
        else:
            fault = _fault_of_pages(connection, "integrity_check")
    finally:
        connection.execute("ROLLBACK" if fault else "COMMIT")
    return fault


def is_export(connection: sqlite3.Connection) -> bool:
    """Whether these are exported plans: sound, and never meant to be worked in."""
    try:
        return _names(connection) == EXPORTED and schema_version(connection) is not None
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return False


def is_known(connection: sqlite3.Connection) -> bool:
    """Whether it is a plan database of some release, damaged perhaps, or holds nothing at all."""
    version = schema_version(connection)
    if version is None:
        return _fault_of_unversioned(connection) is not None
    return version > 0 or not _is_marked(connection)


def _is_marked(connection: sqlite3.Connection) -> bool:
    """Whether another program left its mark in a file without tables."""
    marks = ("application_id", "user_version")
    return any(connection.execute(f"PRAGMA {mark}").fetchone()[0] for mark in marks)


def _fault_of_pages(connection: sqlite3.Connection, check: str) -> str | None:
    """The first fault; one that can be repaired only if it is the only one."""
    faults = [str(row[0]) for row in connection.execute(f"PRAGMA {check}")]
    in_file = [fault for fault in faults if fault != "ok" and " value in " not in fault]
    return min(in_file, key=lambda fault: " index " in fault, default=None)


def _names(connection: sqlite3.Connection) -> set[str]:
    query = "SELECT name FROM sqlite_schema WHERE type = 'table'"
    return {str(name) for (name,) in connection.execute(query)}


def _fault_of_unversioned(connection: sqlite3.Connection) -> str | None:
    ours = len(_names(connection) & set(TABLES)) >= len(TABLES) - 1
    return "its version cannot be read" if ours else None


def _fault_of_columns(connection: sqlite3.Connection) -> str | None:
    missing = set(TABLES) - _names(connection)  # SQLite itself takes Plans for plans
    if missing:
        return f"table {min(missing)} is missing"
    for table, (columns, _) in TABLES.items():
        info = connection.execute(f"PRAGMA table_info({table})")
        if {row[1]: row[2] for row in info} != columns:
            return f"table {table} has other columns than it should"
    return None
