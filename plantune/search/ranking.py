"""Plans as a search compares them: made of covers, affordable, tied, the fastest, improved."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from plantune.base.outcome import Measured, Outcome, Rejected
from plantune.errors import IllegalCandidate
from plantune.graph import Graph, Step
from plantune.graph.partition import partition_into
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates, family_named
from plantune.measure import timing as timings_of
from plantune.measure.timing import Timing, in_common, joined, ratio_interval
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import FALLBACK, default_plan
from plantune.plans.plan import Choice, Plan
from plantune.plans.planner.candidates import FRAMEWORK, VIEW, Key, candidates_of
from plantune.plans.planner.cover import Cover
from plantune.plans.written_words import MEASURED
from plantune.runtime.program.branches import branches_of
from plantune.runtime.program.schedule import make_schedule
from plantune.search import policy
from plantune.search.builds import built_as
from plantune.search.costs import times_us
from plantune.search.step_search import StepSearch
from plantune.space.search_space import SearchSpace

Swap = Mapping[str, Candidate]
TimePlans = Callable[[Sequence[Plan]], Sequence[Timing | Rejected]]


def plan_of(cover: Cover, graph: Graph, space: SearchSpace, *, network: str) -> Plan:
    """The plan of a cover; constants are left to the framework."""
    chosen = [Choice(item.nodes, item.candidate) for item in cover]
    covered = {name for choice in chosen for name in choice.nodes}
    rest = partition_into(
        graph,
        [
            *(choice.nodes for choice in chosen),
            *([node.name] for node in graph.nodes if node.name not in covered),
        ],
    )
    chosen += [
        Choice((step.name,), fallback(step, space)) for step in rest if step.name not in covered
    ]
    plain = default_plan(graph, space, network=network)
    return replace(plain, choices=tuple(chosen), origin=MEASURED)


def fallback(step: Step, space: SearchSpace) -> Candidate:
    """The framework's candidate for a single op."""
    legal = candidates(step, space, (VIEW, FRAMEWORK))
    admitted = (c for preference in FALLBACK for c in legal if preference.admits(step, c))
    found = next(admitted, None)
    if found is None:
        raise IllegalCandidate(f"the framework does not run step {step.name!r}")
    return found


def distinct(plans: Iterable[Plan]) -> list[Plan]:
    """The plans without those that choose the same, whatever their origin."""
    kept: dict[frozenset[Choice], Plan] = {}
    for plan in plans:
        kept.setdefault(frozenset(plan.choices), plan)
    return list(kept.values())


def choose_alike(one: Plan, other: Plan) -> bool:
    """Whether two plans choose the same, whatever their origin."""
    return set(one.choices) == set(other.choices)


def fastest(plans: Sequence[Plan], timings: Sequence[Timing | Rejected]) -> int | None:
    """The index of the plan to keep, None if none ran: of those that tie with the fastest, and do
    not look much slower either, the simplest one, with fewer compiled kernels, then fewer steps.
    """
    times = {i: timing for i, timing in enumerate(timings) if isinstance(timing, Timing)}
    if not times:
        return None
    best = min(times, key=lambda i: times[i].median_us)
    near_us = (1 + policy.UNSURE) * times[best].median_us
    near = [i for i in times if times[i].median_us <= near_us]
    ties = [i for i in near if is_tie(times[i], times[best])]
    return min(ties, key=lambda i: (complexity(plans[i]), times[i].median_us))


def close(timings: Sequence[Timing | Rejected], kind: str) -> list[int]:
    """The indices of those that may be the fastest on this kind of arch."""
    times = {i: timing.median_us for i, timing in enumerate(timings) if isinstance(timing, Timing)}
    least = min(times.values(), default=0.0)
    near = [i for i, us in times.items() if us <= (1 + policy.CLOSE[kind]) * least]
    return sorted(sorted(near, key=times.__getitem__)[: policy.MOST_CLOSE])


def evened(timings: Sequence[Timing | Rejected]) -> list[Timing | Rejected]:
    """The times of plans that ran in the same rounds, as on a machine of even speed."""
    found = iter(timings_of.evened([t for t in timings if isinstance(t, Timing)]))
    return [next(found) if isinstance(t, Timing) else t for t in timings]


def whole(makes: Sequence[Sequence[Timing | Rejected]]) -> Sequence[Sequence[Timing | Rejected]]:
    """The makes that were timed. One for which the time was up says nothing of a plan."""
    return [found for found in makes if not any(map(is_late, found))] or makes[:1]


def of_makes(makes: Sequence[Sequence[Timing | Rejected]]) -> list[Timing | Rejected]:
    """The times of plans, each make of which was timed in the same rounds as that of the others."""
    rows = zip(*makes, strict=True)
    return [next((t for t in row if isinstance(t, Rejected)), None) or _joined(row) for row in rows]


def with_more(
    timings: Sequence[Timing | Rejected], more: Mapping[int, Timing | Rejected], makes: int
) -> list[Timing | Rejected]:
    """The times with those of so many further makes of some of the plans, as if the machine had
    kept its speed. As many rounds of the first make stay as each other has: all count alike.
    """
    pairs = [(timings[i], again) for i, again in more.items()]
    both = [(a, b) for a, b in pairs if isinstance(a, Timing) and isinstance(b, Timing)]
    rounds = min((again.samples // makes for _, again in both), default=0)
    pace = statistics.median([b.median_us / a.median_us for a, b in both] or [1.0])
    found = [_paced(timing, pace, rounds) for timing in timings]
    for i, again in more.items():
        before = found[i]
        if isinstance(before, Timing) and isinstance(again, Timing):
            found[i] = joined(before, again)
        elif isinstance(again, Rejected) and not is_late(again):
            found[i] = again
    return found


def _paced(timing: Timing | Rejected, pace: float, rounds: int) -> Timing | Rejected:
    if not rounds or isinstance(timing, Rejected):
        return timing
    return replace(timing, samples_us=tuple(us * pace for us in timing.samples_us[:rounds]))


def is_late(found: Timing | Rejected) -> bool:
    """Whether the time was up before this was timed."""
    return isinstance(found, Rejected) and found.stage == "timeout"


def _joined(makes: Sequence[Timing | Rejected]) -> Timing:
    return reduce(joined, [made for made in makes if isinstance(made, Timing)])


def kept(
    before: Sequence[Plan],
    plans: Sequence[Plan],
    timings: Sequence[Timing | Rejected],
    winner: int,
) -> int:
    """The index of the winner if it is clearly faster than the plans that were there before, else
    of the first one than which it is not: a plan is never replaced by a worse one.
    """
    best = timings[winner]
    for known in before:
        index = next((i for i, plan in enumerate(plans) if choose_alike(plan, known)), None)
        found = None if index is None else timings[index]
        if index is None or not isinstance(found, Timing) or not isinstance(best, Timing):
            continue
        if not ratio_interval(*in_common(best, found), resamples=policy.TIE_RESAMPLES).high < 1:
            return index
    return winner


def is_tie(one: Timing, other: Timing) -> bool:
    """Whether two that were timed in turns differ by at most TIE, or not for sure.

    The spread of each alone would say less: a machine whose clock has two speeds affects both.
    """
    interval = ratio_interval(*in_common(one, other), resamples=policy.TIE_RESAMPLES)
    return interval.low <= 1 + policy.TIE and interval.high >= 1 - policy.TIE


def complexity(plan: Plan) -> tuple[int, int]:
    """How many choices compile something, and how many choices there are."""
    compiled = sum(family_named(c.candidate.family).build_s > 0 for c in plan.choices)
    return (compiled, len(plan.choices))


def is_deterministic(
    plan: Plan,
    graph: Graph,
    space: SearchSpace,
    outcomes: Mapping[Key, Outcome],
) -> bool:
    """Whether each kernel of a pass gave the same bits whenever it was checked."""
    steps = check_plan(plan, graph, space).of_pass
    found = [outcomes.get((each.step.signature, each.candidate)) for each in steps]
    return all(isinstance(outcome, Measured) and outcome.deterministic for outcome in found)


def swapped(plan: Plan, graph: Graph, space: SearchSpace, swaps: Mapping[str, Candidate]) -> Plan:
    """The plan with other candidates for the steps that start with these nodes."""
    choices = tuple(
        Choice(choice.nodes, swaps.get(choice.nodes[0], choice.candidate))
        for choice in plan.choices
    )
    changed = replace(plan, choices=choices)
    check_plan(changed, graph, space)
    return changed


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
