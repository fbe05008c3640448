"""Plans as small files to commit and share: parameters and evidence, nothing that is executed.

A file is made and read in memory, as one block of bytes. What is read counts as hostile: nothing
reaches a database before the schema is the expected one, letter by letter, and each value is valid.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from plantune.base.files import read_regular, require_replaceable, write_whole
from plantune.errors import ForeignFile, InvalidPlan, NoPlan, PlantuneError
from plantune.plans.database import rows
from plantune.plans.database.missing_families import with_known_families
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.rows import COMPLETE, Row, StoredPlan, require
from plantune.plans.database.validation import check_stored_plan
from plantune.plans.plan import Plan

# 10,000 plans of a ResNet have 100 MB.
SIZE_LIMIT_BYTES = 256 << 20
PLANS_LIMIT = 10_000
_WAL_FORMAT = 2
_TABLES = (
    ("meta", rows.META, "key"),
    ("environments", rows.ENVIRONMENTS, "key"),
    ("plans", rows.PLANS, "id"),
)


def export_plans(
    database: PlanDatabase, path: Path, arch: str, *, network: str | None = None
) -> tuple[Plan, ...]:
    """Writes the newest complete plan of each problem and environment, and returns the plans.

    The same plans give the same bytes. An earlier export at `path` is replaced, in one step;
    raises NoPlan if there is nothing to write.
    """
    stored = _newest(database, arch, network)
    if not stored:
        wanted = f"{network} on {arch}" if network else arch
        raise NoPlan(f"no complete plan for {wanted} is stored; run plantune search")
    write_export(path, stored, database.path)
    return tuple(item.plan for item in stored)


def write_export(path: Path, stored: Sequence[StoredPlan], own: Path | None = None) -> None:
    """Writes complete plans, all valid, in the order that they are given; `own` stays as it is.

    Raises PlantuneError if they are more than `import_plans` takes.
    """
    _require_replaceable(path, own)
    _require_importable(path, f"{len(stored)} plans", len(stored), PLANS_LIMIT)
    content = _packed(stored)
    _require_importable(path, f"{len(content)} bytes", len(content), SIZE_LIMIT_BYTES)
    _write(path, content)


def _require_importable(path: Path, what: str, size: int, limit: int) -> None:
    if size > limit:
        raise PlantuneError(
            f"{path}: would have {what}, and an import takes at most {limit}; nothing was written: "
            "export the plans of one network at a time, --model NAME"
        )


def import_plans(
    path: Path, database: PlanDatabase, *, size_limit_bytes: int = SIZE_LIMIT_BYTES
) -> tuple[Plan, ...]:
    """Adds the plans of an exported file, all or none, and returns those that it holds.

    A plan that the database has already is not added again, and one of kernel families that are
    not here is passed over. Raises InvalidPlan, naming the place.
    """
    stored = read_export(path, size_limit_bytes=size_limit_bytes)
    known = {(item.plan, item.environment) for item in database.plans() if item.status == COMPLETE}
    added = [item for item in stored if (item.plan, item.environment) not in known]
    if added:
        database.put_plans(added)
    return tuple(item.plan for item in stored)


def read_export(path: Path, *, size_limit_bytes: int = SIZE_LIMIT_BYTES) -> tuple[StoredPlan, ...]:
    """The plans of an exported file whose kernel families are here, checked as `import_plans` does;
    writes nothing.
    """
    with _at(str(path)), closing(_unpacked(_content(path, size_limit_bytes))) as connection:
        plans = _checked(connection)
    here = tuple(with_known_families(plans, str(path)))
    if not here:
        raise InvalidPlan(f"{path}: names kernel families that are not here in each of its plans")
    return here


def _newest(database: PlanDatabase, arch: str, network: str | None) -> list[StoredPlan]:
    """In an order that does not depend on when each was found."""
    wanted = [
        item
        for item in database.plans()
        if item.plan.problem.arch == arch and network in (None, item.plan.problem.network)
    ]
    newest = rows.newest_complete(with_known_families(wanted, database.place))
    return [newest[key] for key in sorted(newest, key=repr)]


def _packed(plans: Sequence[StoredPlan]) -> bytes:
    environments = {item.environment.key: item for item in plans}
    with closing(_empty()) as connection:
        db = Database(connection, execute_plugins=False)
        with db.atomic():
            for key in sorted(environments):
                item = environments[key]
                db.table("environments").insert(
                    rows.environment_row(item.environment, item.created_at)
                )
            for number, item in enumerate(plans, 1):
                check_stored_plan(item)
                db.table("plans").insert(rows.plan_row(replace(item, id=number)))
        db.vacuum()
        return connection.serialize()


def _empty() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA page_size = 4096")
    for table, columns, key in _TABLES:
        connection.execute(rows.create_sql(table, columns, [key]))
    connection.execute(
        "INSERT INTO meta VALUES (?, ?)", (rows.SCHEMA_KEY, str(rows.SCHEMA_VERSION))
    )
    connection.commit()
    return connection


def _require_replaceable(path: Path, own: Path | None) -> None:
    if own is not None and own.exists() and path.exists() and path.samefile(own):
        raise ForeignFile(f"{path}: is the database to export from; give another path")
    require_replaceable(path, "an export", _is_export)


def _is_export(content: bytes) -> bool:
    """Whether these bytes have the schema of an export; their plans may be of another release."""
    try:
        with closing(_unpacked(content)) as connection:
            _require_schema(connection)
    except (InvalidPlan, sqlite3.Error, UnicodeDecodeError, MemoryError):
        return False
    return True


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise PlantuneError(f"{path}: cannot be written: {error}; give another path") from error


def _content(path: Path, size_limit_bytes: int) -> bytes:
    try:
        return read_regular(path, size_limit_bytes, follow=False)
    except ForeignFile as error:
        raise InvalidPlan(f"{error}; give the file itself") from error


def _unpacked(content: bytes) -> sqlite3.Connection:
    require(
        content.startswith(rows.MAGIC) and len(content) >= rows.SMALLEST_BYTES,
        "is not an exported plan; give a file that plantune export wrote",
    )
    require(
        _WAL_FORMAT not in content[18:20], "is a working database; make a file by plantune export"
    )
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(content)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA cell_size_check = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _checked(connection: sqlite3.Connection) -> tuple[StoredPlan, ...]:
    _require_schema(connection)
    faults = connection.execute("PRAGMA integrity_check").fetchall()
    require(faults == [("ok",)], f"is damaged: {faults[0][0]}")
    version = rows.select(connection, "meta", {})
    require(
        version == [{"key": rows.SCHEMA_KEY, "value": str(rows.SCHEMA_VERSION)}],
        f"was written by another plantune: schema {rows.SCHEMA_VERSION} expected",
    )
    count = connection.execute("SELECT count(*) FROM plans").fetchone()[0]
    require(1 <= count <= PLANS_LIMIT, f"must hold 1 to {PLANS_LIMIT} plans, got {count}")
    environments = {row["key"]: row for row in rows.select(connection, "environments", {})}
    plans = tuple(_checked_plan(row, environments) for row in rows.select(connection, "plans", {}))
    used = {item.environment.key for item in plans}
    require(used == set(environments), "has environments without a plan")
    return plans


def _require_schema(connection: sqlite3.Connection) -> None:
    """Refuses views, triggers and anything else that could run: the schema is ours exactly."""
    query = "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY type, name"
    with closing(_empty()) as empty:
        expected = empty.execute(query).fetchall()
    require(connection.execute(query).fetchall() == expected, "has another schema than an export")


def _checked_plan(row: Row, environments: dict[Any, Row]) -> StoredPlan:
    """The plan of a row, after everything in the row was made again from the plan and compared."""
    with _at(f"plan {row['id']!r:.20}"):
        environment = environments.get(row["environment"])
        stored = rows.parse_plan(row, environment)
        check_stored_plan(stored)
        require(stored.status == COMPLETE, "status: only complete plans are exchanged")
        made_at = str(environment["created_at"]) if environment else ""
        same = environment == rows.environment_row(stored.environment, made_at)
        require(same, "environment: was changed")
        same = _exact(rows.plan_row(stored)) == _exact(row)
        require(same, "its checksum or a column does not match")
        return stored


def _exact(row: Row) -> dict[str, str]:
    """1 == 1.0 in Python; as texts they differ."""
    return {key: repr(value) for key, value in row.items()}


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Names the place of an error, and makes InvalidPlan of what hostile bytes can raise."""
    try:
        yield
    except InvalidPlan as error:
        raise InvalidPlan(f"{place}: {error}") from error
    except (*rows.FAULTS, sqlite3.Error, MemoryError) as error:
        raise InvalidPlan(f"{place}: is damaged: {error}") from error
