"""Plans that are known before a search, which starts from them and keeps them if they win."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from plantune.base.paths import data_folder
from plantune.devices.machine import Environment
from plantune.errors import DatabaseUnavailable, PlantuneError
from plantune.graph import Attrs, Graph, Step
from plantune.graph.partition import one_by_one, partition_into
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates, estimate_us
from plantune.plans.checked_plan import check_plan
from plantune.plans.database.missing_families import with_known_families
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.rows import COMPLETE, Found, StoredPlan
from plantune.plans.database.stored import find_stored_plan, plans_of_team, stored_plans_in
from plantune.plans.guess import default_plan, guessed_plan
from plantune.plans.plan import EAGER, Choice, Plan, is_for, named_as
from plantune.plans.planner.candidates import FRAMEWORK, VIEW
from plantune.plans.problem import Problem
from plantune.plans.written_words import MEASURED, PREDICTED
from plantune.search import policy
from plantune.search.ranking import distinct, fallback
from plantune.space import SearchSpace


def known_plans(
    graph: Graph,
    space: SearchSpace,
    problem: Problem,
    environment: Environment,
    database: PlanDatabase,
    *,
    shipped: bool = True,
) -> list[Plan]:
    """Plans for the graph: first those that were found for it here, then those for other batches
    and machines of this arch, the nearest first. Without `shipped`, only those measured on this
    machine.
    """
    rows = [row for row in _rows(space, database, shipped=shipped) if _is_alike(row, problem)]
    if not shipped:
        rows = [row for row in rows if row.environment.device_digest == environment.device_digest]
    own = [row for row in rows if is_for(row.plan, graph)]
    own.sort(key=lambda row: row.environment.key != environment.key)
    others = [row for row in rows if not is_for(row.plan, graph)]
    others.sort(key=lambda row: _distance(row, problem, environment))
    plans = [named_as(row.plan, graph) for row in own] + [row.plan for row in others]
    fitting = (fitted(plan, graph, space) for plan in plans)
    found = distinct(plan for plan in fitting if plan is not None)
    return found[: policy.MOST_OWN + policy.MOST_OTHERS]


def incumbent(
    graph: Graph, problem: Problem, environment: Environment, database: PlanDatabase
) -> Plan | None:
    """The plan in this database that calls here use now; only a better one replaces it."""
    found = database.find_plan(problem, environment)
    if found is None or found.match == "foreign" or found.plan.origin == PREDICTED:
        return None
    return named_as(found.plan, graph)


def fitted(plan: Plan, graph: Graph, space: SearchSpace) -> Plan | None:
    """The plan for another shape of the same network; None if nothing of it fits.

    A step whose candidate is not legal here gets the nearest config of its family, else the
    framework op by op.
    """
    if plan.problem.arch != space.arch.name:
        return None
    given = {choice.nodes: choice.candidate for choice in plan.choices}
    try:
        steps = partition_into(graph, _groups(given, graph))
    except PlantuneError:
        return None
    choices: list[Choice] = []
    for step in steps:
        names = tuple(node.name for node in step.nodes)
        candidate = _nearest(step, given.get(names), space)
        choices += [Choice(names, candidate)] if candidate else _one_by_one(step, graph, space)
    if all(choice.candidate.family in (FRAMEWORK, VIEW) for choice in choices):
        return None
    plain = default_plan(graph, space, network=plan.problem.network)
    made = replace(plain, choices=tuple(choices), origin=MEASURED, branches=plan.branches)
    with suppress(PlantuneError):
        check_plan(made, graph, space)
        return made
    return None


def _groups(given: Iterable[Sequence[str]], graph: Graph) -> list[Sequence[str]]:
    """The groups of nodes that are all in the graph, then each other node alone."""
    known = {node.name for node in graph.nodes}
    groups = [group for group in given if known.issuperset(group)]
    rest = known.difference(*groups)
    return [*groups, *((node.name,) for node in graph.nodes if node.name in rest)]


def _rows(space: SearchSpace, database: PlanDatabase, *, shipped: bool) -> Iterable[StoredPlan]:
    with suppress(DatabaseUnavailable):
        yield from with_known_families(database.plans(), database.place)
    yield from (row for _, row in plans_of_team())
    if shipped:
        with suppress(PlantuneError):
            yield from stored_plans_in(data_folder("plans") / f"{space.arch.name}.db")


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


def _nearest(step: Step, given: Candidate | None, space: SearchSpace) -> Candidate | None:
    """The given candidate if it is legal, else the one of its family that has most in common."""
    if given is None:
        return None
    legal = candidates(step, space, (given.family,))
    if given in legal:
        return given

    def closeness(candidate: Candidate) -> tuple[int, float]:
        return _in_common(candidate.config, given.config), -estimate_us(step, candidate)

    return max(legal, key=closeness, default=None)


def _in_common(one: Attrs, other: Mapping[str, object]) -> int:
    return sum(other.get(name) == value for name, value in one.items())


def _one_by_one(step: Step, graph: Graph, space: SearchSpace) -> Sequence[Choice]:
    """The framework for each op of a step that nothing else runs."""
    names = {node.name for node in step.nodes}
    return [
        Choice((single.name,), fallback(single, space))
        for single in one_by_one(graph)
        if single.name in names
    ]


def plan_without_search(graph: Graph, space: SearchSpace, *, network: str) -> Plan:
    """What runs without a plan, so it needs no race; a guess is proved before its first use."""
    plain = default_plan(graph, space, network=network)
    if space.arch.kind == "cpu":
        return replace(plain, route=EAGER)
    return guessed_plan(graph, space, network=network) or plain


def plan_in_use(plan: Plan, database: PlanDatabase, environment: Environment) -> Found | None:
    """The plan that calls use for the same problem, the user's own or a shipped one."""
    found = find_stored_plan(plan.problem, environment, database=database.path)
    return found if found is not None and found.match != "foreign" else None
