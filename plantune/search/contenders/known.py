"""Plans that are known before a search, which starts from them and keeps them if they win."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from plantune.base.paths import data_folder
from plantune.devices.machine import Environment
from plantune.errors import DatabaseUnavailable, PlantuneError
from plantune.plans.database.missing_families import with_known_families
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.rows import COMPLETE, Found, StoredPlan
from plantune.plans.database.stored import find_stored_plan, plans_of_team, stored_plans_in
from plantune.plans.plan import EAGER, Plan, is_for, named_as
from plantune.plans.problem import Problem
from plantune.plans.written_words import MEASURED, PREDICTED
from plantune.search import policy
from plantune.search.contenders.contender import distinct
from plantune.search.contenders.fitting import fitted
from plantune.search.sought import Sought


def known_plans(
    sought: Sought, environment: Environment, database: PlanDatabase, *, shipped: bool = True
) -> list[Plan]:
    """Plans for the graph: first those that were found for it here, then those for other batches
    and machines of this arch, the nearest first. Without `shipped`, only those measured on this
    machine.
    """
    graph, problem = sought.graph, sought.problem
    every = _rows(problem.arch, database, shipped=shipped)
    rows = [row for row in every if _is_alike(row, problem)]
    if not shipped:
        rows = [row for row in rows if row.environment.device_digest == environment.device_digest]
    own = [row for row in rows if is_for(row.plan, graph)]
    own.sort(key=lambda row: row.environment.key != environment.key)
    others = [row for row in rows if not is_for(row.plan, graph)]
    others.sort(key=lambda row: _distance(row, problem, environment))
    plans = [named_as(row.plan, graph) for row in own] + [row.plan for row in others]
    fitting = (fitted(plan, graph, sought.space) for plan in plans)
    found = distinct(plan for plan in fitting if plan is not None)
    return found[: policy.MOST_OWN + policy.MOST_OTHERS]


def incumbent(sought: Sought, environment: Environment, database: PlanDatabase) -> Plan | None:
    """The plan in this database that calls here use now; only a better one replaces it."""
    found = database.find_plan(sought.problem, environment)
    if found is None or found.match == "foreign" or found.plan.origin == PREDICTED:
        return None
    return named_as(found.plan, sought.graph)


def _rows(arch: str, database: PlanDatabase, *, shipped: bool) -> Iterable[StoredPlan]:
    with suppress(DatabaseUnavailable):
        yield from with_known_families(database.plans(), database.place)
    yield from (row for _, row in plans_of_team())
    if shipped:
        with suppress(PlantuneError):
            yield from stored_plans_in(data_folder("plans") / f"{arch}.db")


def _is_alike(row: StoredPlan, problem: Problem) -> bool:
    other = row.plan.problem
    named = ("network", "arch", "mode", "dtype")
    return row.plan.origin in (MEASURED, PREDICTED) and (
        other.graph in (problem.graph, problem.earlier)
        or all(getattr(other, name) == getattr(problem, name) for name in named)
    )


def _distance(
    row: StoredPlan, problem: Problem, environment: Environment
) -> tuple[float, bool, bool, bool]:
    """By batch, then by machine; interrupted and predicted plans come after others."""
    return (
        abs(math.log(row.plan.problem.batch / problem.batch)),
        row.environment.device_digest != environment.device_digest,
        row.status != COMPLETE,
        row.plan.origin == PREDICTED,
    )


def plan_without_search(sought: Sought) -> Plan:
    """What runs without a plan, so it needs no race; a guess is proved before its first use."""
    plain = sought.of_framework[0]
    if sought.space.arch.kind == "cpu":
        return replace(plain, route=EAGER)
    return sought.guess or plain


def plan_in_use(plan: Plan, database: PlanDatabase, environment: Environment) -> Found | None:
    """The plan that calls use for the same problem, the user's own or a shipped one."""
    found = find_stored_plan(plan.problem, environment, database=database.path)
    return found if found is not None and found.match != "foreign" else None
