"""Contenders that are slower than the best known cover by measured times: they are not ranked."""

from __future__ import annotations

from collections.abc import Sequence

from plantune.graph import Graph
from plantune.plan import Plan
from plantune.search.candidates import candidates_of
from plantune.search.cover import Cover
from plantune.search.ranking import CLOSE
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
    own = candidates_of(plan, graph, space)
    chosen = {(item.nodes, item.candidate) for item in own}
    common = [item for item in cover if (item.nodes, item.candidate) in chosen]
    apart_us = best_us - sum(map(steps.costs.of, common))
    return steps.least_us(own) > best_us + CLOSE[space.arch.kind] * apart_us + ROUNDING_US
