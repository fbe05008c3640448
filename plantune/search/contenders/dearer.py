"""Contenders that are slower than the best known cover by measured times: they are not ranked."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plantune.graph import Graph
from plantune.kernels.conversions import ConversionCost, conversion_cost
from plantune.plans.plan import Plan
from plantune.plans.planner.candidates import StepCandidate, candidates_of
from plantune.plans.planner.cover import Cover, best_covers
from plantune.search import policy
from plantune.search.costs import Costs
from plantune.search.step_search import StepSearch
from plantune.space import SearchSpace

# Of sums of the same times in another order.
ROUNDING_US = 1e-6


def without_dearer(
    plans: Sequence[Plan], graph: Graph, space: SearchSpace, steps: StepSearch
) -> list[Plan]:
    """The plans without those that take longer than the best known cover in what they do otherwise,
    by more than two makes of one program differ. Few rounds on a busy machine would choose one.

    What was not measured of a plan counts as nothing. Where a part of the best cover was not, no
    plan is known to be slower.
    """
    found = steps.covers(1) if steps.measured else []
    if not found or any(map(steps.costs.unsure, found[0][1])):
        return list(plans)
    return [plan for plan in plans if not _is_dearer(plan, found[0], graph, space, steps)]


def _is_dearer(
    plan: Plan, best: tuple[float, Cover], graph: Graph, space: SearchSpace, steps: StepSearch
) -> bool:
    best_us, cover = best
    own, kind = candidates_of(plan, graph, space), space.arch.kind
    chosen = {(item.nodes, item.candidate) for item in own}
    common = [item for item in cover if (item.nodes, item.candidate) in chosen]
    apart_us = best_us - sum(map(steps.costs.of, common))
    limit_us = best_us + policy.CLOSE[kind] * apart_us + ROUNDING_US
    return _least_us(own, graph, steps.costs, conversion_cost(space.arch)) > limit_us


def _least_us(
    candidates: Sequence[StepCandidate], graph: Graph, costs: Costs, conversion: ConversionCost
) -> float:
    """What these take together with the conversions between them, by what was measured; at least,
    where some of it was not.
    """
    known = [(c, costs.of(c) if costs.knows(c) else 0.0) for c in candidates]
    if not all(math.isfinite(us) for _, us in known):
        return math.inf
    return best_covers(graph, known, 1, conversion, 1)[0][0]
