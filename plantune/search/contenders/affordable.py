"""For which plans there is time, as far as building their kernels goes."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from plantune.graph import Graph
from plantune.plans.plan import Plan
from plantune.plans.planner.candidates import candidates_of
from plantune.search.builds import built_as
from plantune.search.step_search import StepSearch
from plantune.space.search_space import SearchSpace


def affordable(
    plans: Sequence[Plan],
    graph: Graph,
    space: SearchSpace,
    steps: StepSearch,
    left_s: float,
    built: Sequence[Plan] = (),
) -> list[Plan]:
    """The plans for whose kernels there is time to build them, the first ones first, and those that
    were built before.
    """
    kept = []
    here = steps.built()
    for plan in plans:
        needed_s = 0.0 if plan in built else building_s(plan, graph, space, steps, here)
        if needed_s <= left_s:
            kept.append(plan)
            left_s -= needed_s
    return kept


def building_s(
    plan: Plan,
    graph: Graph,
    space: SearchSpace,
    steps: StepSearch,
    built: Collection[Hashable] | None = None,
) -> float:
    """The time to build what this search has not `built`, each source once; what an earlier search
    built takes less.
    """
    built = steps.built() if built is None else built
    wanted = candidates_of(plan, graph, space)
    missing = {built_as(space.arch, c): c for c in wanted if c.key not in steps.ran}
    known = steps.costs.outcomes
    return sum(
        steps.durations.build_s(c.candidate, cached=c.key in known)
        for source, c in missing.items()
        if source is not None and source not in built
    )
