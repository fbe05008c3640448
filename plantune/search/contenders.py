"""Which plans are timed as wholes: those for whose kernels there is time to build them."""

from __future__ import annotations

from collections.abc import Sequence

from plantune.graph.graph import Graph
from plantune.plan import Plan, candidates_by_step, check_plan
from plantune.search.step_search import StepSearch
from plantune.space.search_space import SearchSpace


def affordable(
    plans: Sequence[Plan], graph: Graph, space: SearchSpace, steps: StepSearch, left_s: float
) -> list[Plan]:
    """The plans, the first ones first, without those that take too long to build."""
    kept = []
    for plan in plans:
        needed_s = building_s(plan, graph, space, steps)
        if needed_s <= left_s:
            kept.append(plan)
            left_s -= needed_s
    return kept


def building_s(plan: Plan, graph: Graph, space: SearchSpace, steps: StepSearch) -> float:
    """The time for what this search did not build; what an earlier one built takes less."""
    parts = check_plan(plan, graph, space)
    chosen = candidates_by_step(plan, parts)
    keys = {(step.signature, chosen[step.name]) for step in parts} - steps.ran
    known = steps.costs.outcomes
    return sum(steps.pace.build_s(key[1], cached=key in known) for key in keys)
