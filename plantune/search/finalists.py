"""Improves a plan by changes that win in the whole program, where isolated wins may vanish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from plantune.graph.graph import Graph
from plantune.kernels.family import Candidate
from plantune.measure.timing import Timing
from plantune.outcome import Measured, Outcome, Rejected
from plantune.plan import Plan, candidates_by_step, check_plan
from plantune.runtime.branches import branches_of
from plantune.runtime.schedule import make_schedule
from plantune.search.candidates import Key
from plantune.search.ranking import is_tie, swapped
from plantune.space.search_space import SearchSpace

# Candidates that are slower by more than this alone are not compared again.
NEAR = 1.15
RUNNERS_UP = 3

Swap = Mapping[str, Candidate]
TimePlans = Callable[[Sequence[Plan]], Sequence[Timing | Rejected]]


def swaps(
    plan: Plan,
    graph: Graph,
    space: SearchSpace,
    outcomes: Mapping[Key, Outcome],
) -> list[Swap]:
    """The runners-up of each kind of step, the slowest steps first."""
    steps = check_plan(plan, graph, space)
    chosen = candidates_by_step(plan, steps)
    places: dict[Key, list[str]] = {}
    for step in steps:
        places.setdefault((step.signature, chosen[step.name]), []).append(step.name)
    near: dict[str, list[tuple[float, Candidate]]] = {}
    for (signature, candidate), outcome in outcomes.items():
        if isinstance(outcome, Measured):
            near.setdefault(signature, []).append((outcome.median_us, candidate))
    found: list[tuple[float, Swap]] = []
    for (signature, candidate), names in places.items():
        ranked = sorted(near.get(signature, ()), key=lambda pair: pair[0])
        limit = NEAR * ranked[0][0] if ranked else 0.0
        others = [(us, c) for us, c in ranked if c != candidate and us <= limit][:RUNNERS_UP]
        found += [(us * len(names), dict.fromkeys(names, other)) for us, other in others]
    return [swap for _, swap in sorted(found, key=lambda pair: -pair[0])]


def improved(
    plan: Plan, graph: Graph, space: SearchSpace, tried: Sequence[Swap], time_plans: TimePlans
) -> Plan:
    """The plan with those swaps that make it faster one by one, if they do so together."""
    timings = time_plans([plan, *(swapped(plan, graph, space, swap) for swap in tried)])
    incumbent, *others = timings
    if not isinstance(incumbent, Timing):
        return plan
    won: dict[str, Candidate] = {}
    order = sorted(range(len(tried)), key=lambda i: _median(others[i]))
    for timing, swap in ((others[i], tried[i]) for i in order):
        if _wins(timing, incumbent) and not set(swap) & set(won):
            won.update(swap)
    if not won:
        return plan
    together = swapped(plan, graph, space, won)
    before, after = time_plans([plan, together])
    return together if isinstance(before, Timing) and _wins(after, before) else plan


def branched(plan: Plan, graph: Graph, space: SearchSpace, time_plans: TimePlans) -> Plan:
    """The plan with steps that run beside each other, if that is faster.

    A fork and a join take time too, and steps slow each other down.
    """
    if space.arch.kind != "cuda":
        return plan
    if not branches_of(make_schedule(graph, plan, check_plan(plan, graph, space))):
        return plan
    forked = replace(plan, branches=True)
    before, after = time_plans([plan, forked])
    return forked if isinstance(before, Timing) and _wins(after, before) else plan


def _wins(timing: Timing | Rejected, incumbent: Timing) -> bool:
    """A tie is not a win."""
    if not isinstance(timing, Timing):
        return False
    return timing.median_us < incumbent.median_us and not is_tie(timing, incumbent)


def _median(timing: Timing | Rejected) -> float:
    return timing.median_us if isinstance(timing, Timing) else float("inf")
