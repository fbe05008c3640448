"""What a search begins from: plans that are known already, made to fit its graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from plantune.canonical import Attrs
from plantune.default_plans import FALLBACK, default_plan
from plantune.errors import DatabaseUnavailable, IllegalCandidate, PlantuneError
from plantune.graph.graph import Graph
from plantune.graph.partition import partition_into
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates, estimate_us
from plantune.machine import Environment
from plantune.paths import data_folder
from plantune.plan import Choice, Plan, check_plan
from plantune.plan_db.database import PlanDatabase
from plantune.plan_db.rows import COMPLETE, ProblemKey, StoredPlan
from plantune.plan_db.stored import stored_plans_in
from plantune.search.ranking import distinct
from plantune.space.search_space import SearchSpace

# Of the problem itself, and of others of the same network.
MOST_OWN, MOST_OTHERS = 4, 4


def known_plans(
    graph: Graph,
    space: SearchSpace,
    problem: ProblemKey,
    environment: Environment,
    database: PlanDatabase,
    *,
    shipped: bool = True,
) -> list[Plan]:
    """Plans for the graph, what was found for it here first, then what was for other batches and
    machines of this arch, nearest first. Without `shipped`, only what was measured on this machine.
    """
    rows = [row for row in _rows(space, database, shipped=shipped) if _is_alike(row, problem)]
    if not shipped:
        rows = [row for row in rows if row.environment.device_digest == environment.device_digest]
    own = [row for row in rows if row.plan.graph == graph.digest]
    own.sort(key=lambda row: row.environment.key != environment.key)
    others = [row for row in rows if row.plan.graph != graph.digest]
    others.sort(key=lambda row: _distance(row, problem, environment))
    fitting = (fitted(row.plan, graph, space) for row in (*own, *others))
    found = distinct(plan for plan in fitting if plan is not None)
    return found[: MOST_OWN + MOST_OTHERS]


def incumbent(problem: ProblemKey, environment: Environment, database: PlanDatabase) -> Plan | None:
    """The plan that calls here find now in this database, to be replaced by a better one only."""
    found = database.find_plan(problem, environment)
    if found is None or found.match == "foreign" or found.plan.origin == "predicted":
        return None
    return found.plan


def fitted(plan: Plan, graph: Graph, space: SearchSpace) -> Plan | None:
    """The plan for another shape of the same network; None where nothing of it fits.

    A step whose candidate is illegal here gets the nearest config of its family, else the
    framework, op by op.
    """
    if plan.arch != space.arch.name:
        return None
    known = {node.name for node in graph.nodes}
    groups = [choice.nodes for choice in plan.choices if set(choice.nodes) <= known]
    covered = {name for group in groups for name in group}
    rest = [(node.name,) for node in graph.nodes if node.name not in covered]
    wished = {choice.nodes: choice.candidate for choice in plan.choices}
    try:
        steps = partition_into(graph, [*groups, *rest])
    except PlantuneError:
        return None
    choices: list[Choice] = []
    kept = 0
    for step in steps:
        names = tuple(node.name for node in step.nodes)
        candidate = _nearest(step, wished.get(names), space)
        kept += candidate is not None and candidate.family not in ("framework", "view")
        choices += [Choice(names, candidate)] if candidate else _one_by_one(step, graph, space)
    if not kept:
        return None
    plain = default_plan(graph, space, network=plan.network)
    made = replace(plain, choices=tuple(choices), origin="measured", branches=plan.branches)
    with suppress(PlantuneError):
        check_plan(made, graph, space)
        return made
    return None


def _rows(space: SearchSpace, database: PlanDatabase, *, shipped: bool) -> Iterable[StoredPlan]:
    with suppress(DatabaseUnavailable):
        yield from database.plans()
    if shipped:
        with suppress(PlantuneError):
            yield from stored_plans_in(data_folder("plans") / f"{space.arch.name}.db")


def _is_alike(row: StoredPlan, problem: ProblemKey) -> bool:
    plan = row.plan
    same = ("arch", "mode", "dtype")
    return plan.origin in ("measured", "predicted") and (
        plan.graph == problem.graph
        or (
            plan.network == problem.network
            and all(getattr(plan, name) == getattr(problem, name) for name in same)
        )
    )


def _distance(
    row: StoredPlan, problem: ProblemKey, environment: Environment
) -> tuple[float, bool, bool, bool]:
    """By the batch, then by the machine; an interrupted or predicted plan comes after others."""
    return (
        abs(math.log(row.plan.batch / problem.batch)),
        row.environment.device_digest != environment.device_digest,
        row.status != COMPLETE,
        row.plan.origin == "predicted",
    )


def _nearest(step: Step, wished: Candidate | None, space: SearchSpace) -> Candidate | None:
    """The wished candidate, or the one of its family that has most in common with it."""
    if wished is None:
        return None
    legal = candidates(step, space, (wished.family,))
    if wished in legal:
        return wished
    return max(
        legal,
        key=lambda c: (_in_common(c.config, wished.config), -estimate_us(step, c)),
        default=None,
    )


def _in_common(one: Attrs, other: Mapping[str, object]) -> int:
    return sum(other.get(name) == value for name, value in one.items())


def _one_by_one(step: Step, graph: Graph, space: SearchSpace) -> Sequence[Choice]:
    """The framework, for each op of a step that nothing else runs."""
    return [
        Choice((single.name,), _framework(single, space))
        for single in partition_into(graph, [(node.name,) for node in graph.nodes])
        if single.name in {node.name for node in step.nodes}
    ]


def _framework(step: Step, space: SearchSpace) -> Candidate:
    legal = candidates(step, space, ("view", "framework"))
    for wish in FALLBACK:
        for candidate in legal:
            if wish.admits(step, candidate):
                return candidate
    raise IllegalCandidate(f"the framework does not run step {step.name!r}")
