"""The captured whole is the judge: plans are timed as whole programs, in turns, and one is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from plantune.default_plans import FALLBACK, default_plan
from plantune.graph.graph import Graph
from plantune.graph.partition import partition_into
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates, family_named
from plantune.measure.outcome import Measured, Outcome, Rejected
from plantune.measure.timing import Timing, ratio_interval
from plantune.plan import Choice, Plan, candidates_by_step, check_plan
from plantune.problem import Problem
from plantune.search.cover import Cover
from plantune.space.search_space import SearchSpace

# What differs by less is not worth a more complicated plan.
TIE = 0.01
TIE_RESAMPLES = 200


def plan_of(cover: Cover, problem: Problem, space: SearchSpace) -> Plan:
    """The plan that a cover describes; constants are left to the framework."""
    graph = problem.graph
    chosen = [
        Choice(tuple(node.name for node in option.step.nodes), option.candidate) for option in cover
    ]
    covered = {name for choice in chosen for name in choice.nodes}
    rest = partition_into(
        graph,
        [
            *(choice.nodes for choice in chosen),
            *([node.name] for node in graph.nodes if node.name not in covered),
        ],
    )
    chosen += [
        Choice((step.name,), _fallback(step, space)) for step in rest if step.name not in covered
    ]
    plain = default_plan(graph, space, network=problem.network)
    return replace(plain, choices=tuple(chosen), origin="measured")


def _fallback(step: Step, space: SearchSpace) -> Candidate:
    legal = candidates(step, space)
    return next(c for wish in FALLBACK for c in legal if wish.admits(step, c))


def distinct(plans: Iterable[Plan]) -> list[Plan]:
    """The plans without those that choose the same, whatever their origin."""
    kept: dict[frozenset[Choice], Plan] = {}
    for plan in plans:
        kept.setdefault(frozenset(plan.choices), plan)
    return list(kept.values())


def fastest(plans: Sequence[Plan], timings: Sequence[Timing | Rejected]) -> int | None:
    """The index of the plan to keep, None where none ran.

    Of those that tie with the fastest the simplest is kept: the one with fewer compiled kernels,
    then fewer steps.
    """
    times = {i: timing for i, timing in enumerate(timings) if isinstance(timing, Timing)}
    if not times:
        return None
    best = min(times, key=lambda i: times[i].median_us)
    ties = [i for i in times if is_tie(times[i], times[best])]
    return min(ties, key=lambda i: (complexity(plans[i]), times[i].median_us))


def kept(
    incumbent: Plan | None,
    plans: Sequence[Plan],
    timings: Sequence[Timing | Rejected],
    winner: int,
) -> int:
    """The index of the winner if it is faster than the incumbent beyond doubt, else that of the
    incumbent: a plan is never replaced by a worse one.
    """
    if incumbent is None:
        return winner
    same = (i for i, plan in enumerate(plans) if set(plan.choices) == set(incumbent.choices))
    index = next(same, None)
    before, after = timings[winner], None if index is None else timings[index]
    if index is None or not isinstance(before, Timing) or not isinstance(after, Timing):
        return winner
    return winner if ratio_interval(before, after, resamples=TIE_RESAMPLES).high < 1 else index


def is_tie(one: Timing, other: Timing) -> bool:
    """Whether two that were timed in turns differ by no more than TIE, or not surely.

    The spread of each alone would say less: a machine whose clock has two speeds moves both.
    """
    interval = ratio_interval(one, other, resamples=TIE_RESAMPLES)
    return interval.low <= 1 + TIE and interval.high >= 1 - TIE


def complexity(plan: Plan) -> tuple[int, int]:
    """How many choices compile something, and how many choices there are."""
    compiled = sum(family_named(c.candidate.family).build_s > 0 for c in plan.choices)
    return (compiled, len(plan.choices))


def is_deterministic(
    plan: Plan,
    graph: Graph,
    space: SearchSpace,
    outcomes: Mapping[tuple[str, Candidate], Outcome],
) -> bool:
    """Whether each kernel of a pass gave the same bits whenever it was checked."""
    steps = check_plan(plan, graph, space)
    chosen = candidates_by_step(plan, steps)
    launched = [step for step in steps if step.phase != "refresh"]
    found = [outcomes.get((step.signature, chosen[step.name])) for step in launched]
    return all(isinstance(outcome, Measured) and outcome.deterministic for outcome in found)


def swapped(plan: Plan, graph: Graph, space: SearchSpace, swaps: Mapping[str, Candidate]) -> Plan:
    """The plan with other candidates for the steps that start with these nodes."""
    choices = tuple(
        replace(choice, candidate=swaps.get(choice.nodes[0], choice.candidate))
        for choice in plan.choices
    )
    changed = replace(plan, choices=choices)
    check_plan(changed, graph, space)
    return changed
