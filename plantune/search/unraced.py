"""What is kept where the time was too short for a race: nothing that could be slower than eager."""

from __future__ import annotations

from dataclasses import replace

from plantune.default_plans import default_plan
from plantune.machine import Environment
from plantune.plan import EAGER, Plan
from plantune.plan_db.database import PlanDatabase
from plantune.plan_db.rows import Found, ProblemKey
from plantune.plan_db.stored import find_stored_plan
from plantune.problem import Problem
from plantune.space.search_space import SearchSpace


def known_plan(plan: Plan, database: PlanDatabase, environment: Environment) -> Found | None:
    """The plan for the same problem that calls find already, the user's own or a shipped one."""
    found = find_stored_plan(ProblemKey.of(plan), environment, database=database.path)
    return found if found is not None and found.match != "foreign" else None


def plain_plan(problem: Problem, space: SearchSpace) -> Plan:
    """What runs without a plan: no race is needed for it."""
    plain = default_plan(problem.graph, space, network=problem.network)
    return replace(plain, runner=EAGER) if space.arch.kind == "cpu" else plain
