"""What the runtime reads of stored plans: the user's own, then those that plantune ships.

Only Python's own sqlite3, only reading, and no error: without a plan the framework runs.
"""

from __future__ import annotations

import os
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from plantune.errors import DatabaseWarning, PlantuneError
from plantune.machine import Environment
from plantune.paths import data_folder, database_path
from plantune.plan_db.rows import (
    SCHEMA_VERSION,
    Found,
    StoredPlan,
    best,
    connect_read_only,
    find_plan,
    read_plans,
    schema_version,
)
from plantune.problem import Problem

WAIT_S = 2.0
# CPUs differ more than the GPUs of an arch do: a search begins from what is shipped for them.
CONTENDERS_ONLY = ("cpu",)


def find_stored_plan(
    problem: Problem, environment: Environment, *, database: Path | None = None
) -> Found | None:
    """The newest complete plan for a problem; `database` is read instead of the user's.

    An exact match comes before a compatible one, the user's plans before the shipped ones. The
    match is `foreign` if all plans there are were made for another chip: they must not be used.
    What is wrong with a database is warned of and never raised.
    """
    found: list[Found | None] = []
    for path in _places(problem.arch, database):
        found.append(_find_in(path, problem, environment))
        if found[-1] is not None and found[-1].match == "exact":
            break
    return best(found)


def stored_plans_in(path: Path) -> list[StoredPlan]:
    """All plans of a database, the newest first; none if it is missing or cannot be read."""
    with suppress(sqlite3.Error, OSError, LookupError, ValueError):
        if path.is_file():
            with closing(connect_read_only(path, WAIT_S)) as connection:
                if schema_version(connection) == SCHEMA_VERSION:
                    return read_plans(connection, {})
    return []


def _places(arch: str, database: Path | None) -> Iterator[Path]:
    yield database or database_path()
    if arch in CONTENDERS_ONLY:
        return
    with suppress(PlantuneError):  # an incomplete installation is reported where it hurts
        yield data_folder("plans") / f"{arch}.db"


def _find_in(path: Path, problem: Problem, environment: Environment) -> Found | None:
    if not os.path.exists(path):
        return None
    try:
        if not path.is_file():  # SQLite would wait for a pipe's other end
            raise OSError("it is not a regular file")
        with closing(connect_read_only(path, WAIT_S)) as connection:
            version = schema_version(connection)
            if version == SCHEMA_VERSION:
                return find_plan(connection, problem, environment)
        if version == 0:
            return None
        fault = f"schema {SCHEMA_VERSION} expected, got {version or 'that of another program'}"
    except (sqlite3.Error, OSError, LookupError, ValueError) as error:
        fault = str(error)
    warnings.warn(f"{path}: its plans cannot be read: {fault}", DatabaseWarning, stacklevel=3)
    return None
