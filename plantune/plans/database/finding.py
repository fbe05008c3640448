"""Finds the plan for a problem among those that are stored, and how well it matches."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from plantune.devices.machine import Environment
from plantune.plans.database import rows
from plantune.plans.database.missing_families import missing_family, warn_of
from plantune.plans.database.rows import COMPLETE, Found, Row, StoredPlan
from plantune.plans.problem import Problem
from plantune.plans.written_words import PREDICTED

# Of a plan as it is written, the list of its precisions and a little more; empty if it has none.
WRITTEN_PRECISIONS = (
    """CASE instr(plan, '"precisions":') WHEN 0 THEN '' """
    """ELSE substr(plan, instr(plan, '"precisions":'), 40) END"""
)


def find_plan(
    connection: sqlite3.Connection,
    problem: Problem,
    environment: Environment,
    status: str = COMPLETE,
) -> Found | None:
    """The newest plan that matches exactly, else compatibly, else one for another chip.

    The name of the network does not count: its layers are all in the graph.
    """
    wanted = ({**layers, "status": status} for layers in problem.layers)
    heeds = bool(problem.precisions)
    stored = [
        item for where in wanted for item in newest_plans(connection, where, by_precisions=heeds)
    ]
    return best_of(stored, problem, environment)


def best_of(
    stored: Iterable[StoredPlan], problem: Problem, environment: Environment
) -> Found | None:
    """As `find_plan`, of plans that all have the problem's graph."""

    def found(item: StoredPlan) -> Found:
        of = item.plan.problem
        match = environment.match(item.environment) if of.arch == problem.arch else "foreign"
        if match == "exact" and problem.precisions and not of.precisions:
            match = "compatible"  # it was measured under settings that nobody kept
        return Found(item.plan, item.environment, match, item.id)

    return best(found(item) for item in stored if item.plan.problem.suits(problem))


def best(found: Iterable[Found | None]) -> Found | None:
    """The first of the best matches; of equal ones a measured plan before a predicted one."""
    order = ("exact", "compatible", "foreign")

    def place(item: Found) -> tuple[int, bool]:
        return order.index(item.match), item.plan.origin == PREDICTED

    return min((item for item in found if item is not None), key=place, default=None)


def newest_plans(
    connection: sqlite3.Connection, where: Mapping[str, Any], *, by_precisions: bool = False
) -> list[StoredPlan]:
    """The newest usable plan of each environment and origin, and `by_precisions` of each setting of
    float32, of those with these values. The others are not read: thousands of them would cost the
    first call seconds.
    """
    found: dict[tuple[Any, ...], StoredPlan] = {}
    kinds: dict[int, tuple[Any, ...]] = {}
    passed_over: list[StoredPlan] = []
    parse = rows.plan_parser(connection)

    def newest() -> Iterator[tuple[Row, Row]]:
        condition = " AND ".join(f'"{name}" IS ?' for name in where)
        columns = "id, environment, origin" + f", {WRITTEN_PRECISIONS}" * by_precisions
        query = f"SELECT {columns} FROM plans WHERE {condition} ORDER BY id DESC"
        for id, *kind in connection.execute(query, tuple(where.values())).fetchall():
            kinds[id] = tuple(kind)
            if kinds[id] not in found:  # one that could not be used is not there
                own = {**where, "id": id, "environment": kind[0], "origin": kind[1]}
                yield from ((row, own) for row in rows.select(connection, "plans", own))

    def keep(row: Row) -> None:
        item = parse(row)
        if missing_family(item.plan) is None:
            found[kinds[row["id"]]] = item
        else:
            passed_over.append(item)

    rows.usable(connection, "plans", newest(), keep)
    warn_of(passed_over, rows.place_of(connection))
    return list(found.values())
