"""Makes a plan faster: runners-up of single steps, and steps that run beside each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from plantune.base.outcome import Outcome, Rejected
from plantune.graph import Graph
from plantune.kernels.family import Candidate
from plantune.measure.timing import Timing
from plantune.plans.checked_plan import check_plan
from plantune.plans.plan import Choice, Plan
from plantune.plans.planner.candidates import Key
from plantune.runtime.program.branches import branches_of
from plantune.runtime.program.schedule import make_schedule
from plantune.search import policy
from plantune.search.contenders.comparison import is_tie
from plantune.search.costs import times_us
from plantune.space.search_space import SearchSpace

Swap = Mapping[str, Candidate]
TimePlans = Callable[[Sequence[Plan]], Sequence[Timing | Rejected]]


def swaps(
    plan: Plan,
    graph: Graph,
    space: SearchSpace,
    outcomes: Mapping[Key, Outcome],
) -> list[Swap]:
    """The runners-up of each kind of step, the slowest steps first."""
    places: dict[Key, list[str]] = {}
    for each in check_plan(plan, graph, space).of_pass:
        places.setdefault((each.step.signature, each.candidate), []).append(each.name)
    times = times_us(outcomes)
    found: list[tuple[float, Swap]] = []
    for (signature, candidate), names in places.items():
        ranked = sorted(times.get(signature, {}).items(), key=lambda pair: pair[1])
        limit = policy.NEAR * ranked[0][1] if ranked else 0.0
        others = [(c, us) for c, us in ranked if c != candidate and us <= limit][
            : policy.RUNNERS_UP
        ]
        found += [(us * len(names), dict.fromkeys(names, other)) for other, us in others]
    return [swap for _, swap in sorted(found, key=lambda pair: -pair[0])]


def swapped(plan: Plan, graph: Graph, space: SearchSpace, swaps: Mapping[str, Candidate]) -> Plan:
    """The plan with other candidates for the steps that start with these nodes."""
    choices = tuple(
        Choice(choice.nodes, swaps.get(choice.nodes[0], choice.candidate))
        for choice in plan.choices
    )
    changed = replace(plan, choices=choices)
    check_plan(changed, graph, space)
    return changed


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
    if not branches_of(make_schedule(check_plan(plan, graph, space))):
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
