"""The files that `plan=` takes: one plan as JSON, or a database that `plantune export` wrote."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from plantune.base.files import read_regular
from plantune.devices.machine import Environment
from plantune.errors import ForeignFile, ForeignPlan, InvalidPlan, NoPlan
from plantune.plans.database import rows
from plantune.plans.database.finding import best_of
from plantune.plans.database.missing_families import with_known_families
from plantune.plans.database.team import why_no_plans
from plantune.plans.plan import Plan
from plantune.plans.problem import Problem

SIZE_LIMIT_BYTES = 16 << 20
WAIT_S = 2.0
NAMED = 5  # of the plans that a file has
EXPECTED = "a plan as `plantune plans export` writes it, or a database as `plantune export` does"


@dataclass(frozen=True)
class PlanFile:
    """The plans of a database that somebody gave; the one that fits is looked for in them."""

    path: str
    stored: tuple[rows.StoredPlan, ...]

    def find(self, problem: Problem, here: Environment) -> rows.Found | None:
        """The best plan for these layers, one for another chip included."""
        known = [(item, item.plan.problem.layers) for item in self.stored]
        fits = [item for one in problem.layers for item, layers in known if one in layers]
        return best_of(fits, problem, here)

    def plan_for(self, problem: Problem, here: Environment) -> Plan:
        """Raises NoPlan if there is none, ForeignPlan if all are for other chips."""
        found = self.find(problem, here)
        if found is None:
            raise NoPlan(
                f"{self.path}: has no plan for the layers of {problem}; it has {self._named()}"
            )
        if found.match == "foreign":
            expected = f"{here.arch} ({here.device})"
            got = f"{found.environment.arch} ({found.environment.device})"
            text = f"its plan for {problem.network} is for another chip: expected {expected}"
            raise ForeignPlan(f"{self.path}: {text}, got {got}", expected, got)
        return found.plan

    def _named(self) -> str:
        named = [str(item.plan.problem) for item in self.stored]
        more = len(named) - NAMED
        return "; ".join(named[:NAMED]) + (f"; and {more} more" if more > 0 else "")


def read_plan_file(path: Path) -> Plan | PlanFile:
    """What a file holds; raises InvalidPlan if it is neither."""
    if _is_database(path):
        return PlanFile(str(path), _plans_of(path))
    try:
        content = read_regular(path, SIZE_LIMIT_BYTES)
    except ForeignFile as error:
        raise InvalidPlan(f"{path}: {error}; give {EXPECTED}") from error
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidPlan(f"{path}: is not text; give {EXPECTED}") from error
    if not text.lstrip().startswith("{"):
        raise InvalidPlan(f"{path}: holds no plan; give {EXPECTED}")
    try:
        return Plan.loads(text)
    except InvalidPlan as error:
        raise InvalidPlan(f"{path}: {error}") from error


def _is_database(path: Path) -> bool:
    if not path.is_file():  # a pipe would be waited for
        return False
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(rows.MAGIC)) == rows.MAGIC
    return False


def _plans_of(path: Path) -> tuple[rows.StoredPlan, ...]:
    try:
        with closing(rows.connect_read_only(path, WAIT_S)) as connection:
            connection.execute("PRAGMA trusted_schema = OFF")
            if (fault := why_no_plans(connection)) is not None:
                raise InvalidPlan(f"{path}: {fault}; give {EXPECTED}")
            stored = tuple(rows.read_plans(connection, {"status": rows.COMPLETE}))
    except (sqlite3.Error, OSError, LookupError, ValueError) as error:
        raise InvalidPlan(f"{path}: cannot be read: {error}; give {EXPECTED}") from error
    if not stored:
        raise NoPlan(f"{path}: has no complete plan; run plantune search")
    here = tuple(with_known_families(stored, str(path)))
    if not here:
        raise NoPlan(f"{path}: has no complete plan of kernels that are here; run plantune search")
    return here
