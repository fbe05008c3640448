"""The rows of the plan database: their columns, their checksum, and the plan that a row holds.

It needs Python's own sqlite3 only, so that the runtime can read plans without the plan database.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from plantune.base.canonical import canonical, digest, words
from plantune.base.warning import warn
from plantune.devices.machine import Environment
from plantune.errors import DamagedRow, InvalidPlan
from plantune.plans.plan import Plan
from plantune.plans.problem import PROBLEM_FIELDS, Problem
from plantune.plans.written_words import BEST_ROUTE, BEST_ROUTE_MS

T = TypeVar("T")
Row = dict[str, Any]

SCHEMA_VERSION = 1
SCHEMA_KEY = "plantune_schema"  # the row of `meta` that holds the version
CHECKSUM = "sha256"
MAGIC = b"SQLite format 3\0"
SMALLEST_BYTES = 512  # the smallest page of SQLite
COMPLETE, PARTIAL = "complete", "partial"
UNWRITABLE = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
# Exceptions from parsing a malformed row.
FAULTS = (InvalidPlan, ArithmeticError, LookupError, RecursionError, TypeError, ValueError)

TEXT, INTEGER, REAL = "TEXT", "INTEGER", "REAL"
META = {"key": TEXT, "value": TEXT}
ENVIRONMENTS = dict.fromkeys(
    words(f"key arch device torch plantune system json created_at {CHECKSUM}"), TEXT
)
TRIALS = {
    **dict.fromkeys(words("step candidate environment kind stage reason"), TEXT),
    **dict.fromkeys(words("median_us low_us high_us"), REAL),
    **{"samples": INTEGER, "error": REAL, "bound": REAL, "deterministic": INTEGER},
    **dict.fromkeys(("cache", "created_at", CHECKSUM), TEXT),
}
PROBLEM = {name: {str: TEXT, int: INTEGER}[type_] for name, type_ in PROBLEM_FIELDS.items()}
EVIDENCE = {"median_ms": REAL, BEST_ROUTE: TEXT, BEST_ROUTE_MS: REAL, "ratio": REAL}
PLANS = {
    **{"id": INTEGER, **PROBLEM},
    **dict.fromkeys(words("environment origin status plan"), TEXT),
    **{**EVIDENCE, "created_at": TEXT, CHECKSUM: TEXT},
}

# By what a call looks for plans. It is no part of the schema: plantune works without it too, and
# the files that `export` writes have none.
PLANS_INDEX = "plans_by_problem"
INDEXED = ("graph", "batch", "dtype", "mode", "status", "environment", "origin")


@dataclass(frozen=True)
class StoredPlan:
    """A plan as a database keeps it. `status` is complete or partial, `created_at` UTC."""

    id: int
    plan: Plan
    environment: Environment
    status: str
    created_at: str


Key = tuple[Problem, str]


def newest_complete(stored: Iterable[StoredPlan]) -> dict[Key, StoredPlan]:
    """The newest complete plan of each problem and environment, of plans the newest first."""
    newest: dict[Key, StoredPlan] = {}
    for item in stored:
        if item.status == COMPLETE:
            newest.setdefault((item.plan.problem.key, item.environment.key), item)
    return newest


@dataclass(frozen=True)
class Found:
    """A stored plan for a problem, and how it may be used here: exact, compatible or foreign.

    `whose` database has it: the user's own, the team's, or a shipped one.
    """

    plan: Plan
    environment: Environment
    match: str
    id: int
    whose: str = "own"


def create_sql(table: str, columns: Mapping[str, str], key: Sequence[str]) -> str:
    """The statement that makes a table.

    No column refuses NULL: then SQLite's own check would condemn a whole file for one bad row.
    """
    lines = [f'    "{name}" {type_}' for name, type_ in columns.items()]
    lines.append(f"    PRIMARY KEY ({', '.join(key)})")
    return f'CREATE TABLE "{table}" (\n' + ",\n".join(lines) + "\n)"


def checksum(table: str, row: Mapping[str, Any]) -> str:
    """The sha256 over a row's canonical content, the checksum itself left out."""
    content = {name: value for name, value in row.items() if name != CHECKSUM}
    return digest([table, content])


def sealed(table: str, row: Mapping[str, Any]) -> Row:
    return {**row, CHECKSUM: checksum(table, row)}


def environment_row(environment: Environment, created_at: str) -> Row:
    data = environment.to_json()
    readable = {name: data[name] for name in ("arch", "device", "torch", "plantune", "system")}
    row = {"key": environment.key, **readable, "json": canonical(data), "created_at": created_at}
    return sealed("environments", row)


def plan_row(stored: StoredPlan) -> Row:
    plan = stored.plan
    row = {
        "id": stored.id,
        **{name: getattr(plan.problem, name) for name in PROBLEM},
        "environment": stored.environment.key,
        "origin": plan.written_origin,
        "status": stored.status,
        "plan": plan.dumps(),
        **{name: _evidence(plan, name) for name in EVIDENCE},
        "created_at": stored.created_at,
    }
    return sealed("plans", row)


def _evidence(plan: Plan, name: str) -> float | str | None:
    value = plan.evidence.get(name)
    if EVIDENCE[name] is TEXT:
        return value if type(value) is str else None
    # As SQLite will give it back: an integer in a REAL column becomes a float.
    return float(value) if isinstance(value, (int, float)) else None


def index_sql() -> str:
    """The statement that makes the index of plans where it is missing."""
    return f"CREATE INDEX IF NOT EXISTS {PLANS_INDEX} ON plans ({', '.join(INDEXED)})"


def connect_read_only(path: Path, timeout_s: float) -> sqlite3.Connection:
    """A connection that writes nothing, not even if the folder cannot be written."""
    uri = path.absolute().as_uri() + "?mode=ro"
    connection = connected(uri, timeout_s)
    try:
        connection.execute("SELECT 1 FROM sqlite_schema").fetchall()
    except sqlite3.OperationalError as error:
        connection.close()
        # WAL needs a file beside the database. If it cannot be made and no other process has
        # made one, no writer is left, and the file can be read as it is.
        unwritable = error.sqlite_errorcode & 0xFF in UNWRITABLE
        if not unwritable or not path.is_file():
            raise
        if os.path.exists(f"{path}-wal"):
            return _with_its_log(path)
        return connected(uri + "&immutable=1", timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def _with_its_log(path: Path) -> sqlite3.Connection:
    """A database in memory, with what a killed writer left in the log; what a living one is about
    to write fails its checksum.
    """
    with tempfile.TemporaryDirectory(prefix="plantune-") as folder:
        copy = Path(folder) / "plans.db"
        for ending in ("", "-wal"):
            shutil.copyfile(f"{path}{ending}", f"{copy}{ending}")
        with contextlib.closing(connected(f"{copy.as_uri()}?mode=rw")) as connection:
            memory = connected("file::memory:")
            connection.backup(memory)
            return memory


def connected(uri: str, timeout_s: float = 5.0) -> sqlite3.Connection:
    """A connection that reads any text."""
    connection = sqlite3.connect(uri, uri=True, timeout=timeout_s)
    connection.text_factory = lenient_text
    return connection


def lenient_text(data: bytes) -> str:
    """Text as it is stored: what is not UTF-8 must fail a row's checksum, not the whole query."""
    return data.decode("utf-8", "surrogateescape")


def schema_version(connection: sqlite3.Connection) -> int | None:
    """The version of plantune's schema, 0 of an empty database, None of another program's."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    if not tables:
        return 0
    try:
        query = "SELECT value FROM meta WHERE key = ?"
        row = connection.execute(query, (SCHEMA_KEY,)).fetchone()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
            raise
        return None  # no such table or column
    text = "" if row is None else str(row[0])
    return int(text) if text.isdecimal() and len(text) < 10 else None


def select(connection: sqlite3.Connection, table: str, where: Mapping[str, Any]) -> list[Row]:
    """The rows that have these values, as they are stored and unchecked."""
    condition = " AND ".join(f'"{name}" IS ?' for name in where) or "1"
    cursor = connection.execute(
        f'SELECT * FROM "{table}" WHERE {condition} ORDER BY rowid', tuple(where.values())
    )
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, values, strict=True)) for values in cursor]


def read(
    connection: sqlite3.Connection,
    table: str,
    where: Mapping[str, Any],
    parse: Callable[[Row], T],
) -> list[T]:
    """What `parse` makes of the rows that have these values; warns once of those it cannot use."""
    asked = ((row, where) for row in select(connection, table, where))
    return usable(connection, table, asked, parse)


def usable(
    connection: sqlite3.Connection,
    table: str,
    rows: Iterable[tuple[Row, Mapping[str, Any]]],
    parse: Callable[[Row], T],
) -> list[T]:
    """As `read`, of rows beside the values that each was asked for with."""
    values, faults = [], []
    for row, where in rows:
        try:
            # An index that was damaged returns rows that were not asked for.
            require(all(row[name] == value for name, value in where.items()), "its key differs")
            require(row[CHECKSUM] == checksum(table, row), "its checksum does not match")
            values.append(parse(row))
        except FAULTS as error:
            faults.append(str(error))
    if faults:
        warn(
            f"{place_of(connection)}: {len(faults)} of the rows in {table} cannot be used and "
            f"are ignored; the first: {faults[0]:.200}",
            DamagedRow,
        )
    return values


def require(condition: bool, fault: str) -> None:
    """Raises InvalidPlan with the fault unless the condition holds."""
    if not condition:
        raise InvalidPlan(fault)


def place_of(connection: sqlite3.Connection) -> str:
    with contextlib.suppress(sqlite3.Error):
        return str(connection.execute("PRAGMA database_list").fetchone()[2]) or "in memory"
    return "the plan database"


def read_plans(connection: sqlite3.Connection, where: Mapping[str, Any]) -> list[StoredPlan]:
    """The plans with these values, the newest first."""
    return read(connection, "plans", where, plan_parser(connection))[::-1]


def plan_parser(connection: sqlite3.Connection) -> Callable[[Row], StoredPlan]:
    """Reads the plan of a row whose checksum was checked; raises InvalidPlan."""
    environments = {row["key"]: row for row in select(connection, "environments", {})}
    return lambda row: parse_plan(row, environments.get(row["environment"]))


def parse_plan(row: Row, environment: Row | None) -> StoredPlan:
    """The plan of a row whose checksum was checked; raises InvalidPlan."""
    plan = Plan.loads(row["plan"])
    own = Problem(**{name: row[name] for name in PROBLEM})
    require(replace(plan.problem.key, precisions=()) == own, "its key is not that of its plan")
    require(row["status"] in (COMPLETE, PARTIAL), f"status: got {row['status']!r}")
    if environment is None or environment[CHECKSUM] != checksum("environments", environment):
        raise InvalidPlan(f"plan {row['id']}: its environment is missing or damaged")
    parsed = Environment.from_json(json.loads(environment["json"]))
    require(parsed.key == row["environment"], "its environment has another key")
    return StoredPlan(row["id"], plan, parsed, row["status"], row["created_at"])
