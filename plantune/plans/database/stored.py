"""What the runtime reads of stored plans: the user's own, a team's, then those that plantune ships.

Only Python's own sqlite3, only reading, and no error: without a plan the framework runs.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from plantune.base.paths import data_folder, database_path, team_plans
from plantune.base.warning import warn
from plantune.devices.machine import Environment
from plantune.errors import DatabaseWarning, PlantuneError
from plantune.plans.database import rows
from plantune.plans.database.finding import best, find_plan
from plantune.plans.database.missing_families import with_known_families
from plantune.plans.database.team import FAULTS, from_file, plans_of
from plantune.plans.problem import Problem
from plantune.plans.written_words import MEASURED

WAIT_S = 2.0
# CPUs differ more than the GPUs of an arch do: what is shipped for them must win a race first, in a
# search or in the first calls.
CONTENDERS_ONLY = ("cpu",)
OWN, TEAM, SHIPPED = "own", "team", "shipped"


def find_stored_plan(
    problem: Problem, environment: Environment, *, database: Path | None = None
) -> rows.Found | None:
    """The newest complete plan for a problem; `database` is read instead of the user's.

    An exact match comes before a compatible one; of equal ones the user's plans come before a
    team's (PLANTUNE_PLANS), and these before the shipped ones. The match is `foreign` if all plans
    there are were made for another chip: they must not be used. What is wrong with a database is
    warned of and never raised.
    """
    found: list[rows.Found | None] = []
    for path, whose in _places(problem.arch, database):
        found.append(_find_in(path, whose, problem, environment))
        if found[-1] is not None and found[-1].match == "exact":
            break
    return best(found)


def shipped_contender(problem: Problem, environment: Environment) -> rows.Found | None:
    """The plan that plantune ships for a problem on a CPU, where it must first win a race. None if
    it has none, or one that another route is known to beat.
    """
    if problem.arch not in CONTENDERS_ONLY:
        return None
    found = None
    with suppress(PlantuneError):  # an incomplete installation is reported where it hurts
        found = _find_in(shipped_file(problem.arch), SHIPPED, problem, environment)
    if found is None or found.match == "foreign" or found.plan.origin != MEASURED:
        return None
    return found


def shipped_file(arch: str) -> Path:
    """The plans that plantune ships for an arch."""
    return data_folder("plans") / f"{arch}.db"


def stored_plans_in(path: Path) -> list[rows.StoredPlan]:
    """All plans of a database, the newest first; none if it is missing or cannot be read."""
    with suppress(sqlite3.Error, OSError, LookupError, ValueError):
        if path.is_file():
            with closing(rows.connect_read_only(path, WAIT_S)) as connection:
                if rows.schema_version(connection) == rows.SCHEMA_VERSION:
                    return with_known_families(rows.read_plans(connection, {}), str(path))
    return []


def plans_of_team() -> list[tuple[Path, rows.StoredPlan]]:
    """All plans of the team with the file that has them; what cannot be read is warned of."""
    found: list[tuple[Path, rows.StoredPlan]] = []
    for path in team_plans():
        try:
            found += [(path, item) for item in plans_of(path)]
        except FAULTS as error:
            _warn_of(path, str(error))
    return found


def _places(arch: str, database: Path | None) -> Iterator[tuple[Path, str]]:
    yield database or database_path(), OWN
    yield from ((path, TEAM) for path in team_plans())
    if arch in CONTENDERS_ONLY:
        return
    with suppress(PlantuneError):  # an incomplete installation is reported where it hurts
        yield shipped_file(arch), SHIPPED


def _find_in(
    path: Path, whose: str, problem: Problem, environment: Environment
) -> rows.Found | None:
    def find(connection: sqlite3.Connection) -> rows.Found | None:
        found = find_plan(connection, problem, environment)
        return None if found is None else replace(found, whose=whose)

    try:
        if whose == TEAM:
            return from_file(path, find)
        if not os.path.exists(path):
            return None
        if not path.is_file():  # SQLite would wait for a pipe's other end
            raise OSError("it is not a regular file")
        with closing(rows.connect_read_only(path, WAIT_S)) as connection:
            version = rows.schema_version(connection)
            if version == rows.SCHEMA_VERSION:
                return find(connection)
        if version == 0:
            return None
        fault = f"schema {rows.SCHEMA_VERSION} expected, got {version or 'that of another program'}"
    except FAULTS as error:
        fault = str(error)
    _warn_of(path, fault)
    return None


def _warn_of(path: Path, fault: str) -> None:
    warn(f"{path}: its plans cannot be read: {fault}", DatabaseWarning)
