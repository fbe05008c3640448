"""Ranks whole plans: all in turns, then the closest again, and improves the winner."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from plantune.base.outcome import Rejected
from plantune.base.warning import warn
from plantune.errors import NoViableCandidate, OutOfTime
from plantune.measure.timing import Timing
from plantune.plans.plan import Plan
from plantune.plans.problem import Problem
from plantune.plans.written_words import MEASURED
from plantune.search import policy
from plantune.search.contenders.affordable import affordable
from plantune.search.contenders.comparison import close, fastest, is_late, kept, of_makes, with_more
from plantune.search.contenders.contender import IN_USE, TIMED, Contenders, choose_alike
from plantune.search.contenders.improvement import branched, improved, swaps
from plantune.search.contenders.timing import (
    Found,
    compared,
    makes_that_fit,
    time_makes,
    time_plans,
    whole_makes,
)
from plantune.search.run import Run

NOT_COMPARED = "the plan that calls use now was not compared"


def rank(run: Run, contenders: Contenders) -> list[Plan]:
    """The plans that ran: the winner improved, the winner, then the others, the fastest first. What
    is not clearly faster than the plans that were there before does not win.

    Without time to measure them, the plans in their estimated order, the best first. Raises
    OutOfTime if there is none for the one that calls use.
    """
    arch, left_s = run.space.arch, run.budget.left_for("ranking")
    plans = _that_fit(run, contenders, left_s)
    if left_s < policy.LEAST_RANKING_S:
        return plans
    run.enter("ranking")
    seconds = policy.RANKED_AT_FIRST[arch.kind] * left_s
    try:
        timings = time_plans(run, plans, run.budget.limited(compared(arch, seconds), "ranking"))
    except OutOfTime:
        return plans
    _warn_of_lost(contenders, plans, timings)
    in_time = [p for p, found in zip(plans, timings, strict=True) if not is_late(found)]
    _require_among(in_time, contenders.first(IN_USE))
    return _ranked(run, plans, _close_again(run, plans, timings), contenders.before)


def _that_fit(run: Run, contenders: Contenders, left_s: float) -> list[Plan]:
    """The plans for which there is time, few of them on a busy machine."""
    every, timed = contenders.plans(), contenders.plans(TIMED)
    plans = affordable(every, run.graph, run.space, run.steps, left_s, timed)
    _require_among(plans, contenders.first(IN_USE))
    if run.machine is not None and run.machine.word == "busy":
        few = policy.FEW_PLANS  # a call may take a hundred times as long
        return [*plans[:few], *plans[few:][-1:]]
    return plans


def _warn_of_lost(contenders: Contenders, plans: Sequence[Plan], timings: Sequence[Found]) -> None:
    """Of plans that ran in the warm start and do not run any more."""
    timed = contenders.plans(TIMED)
    for plan, found in zip(plans, timings, strict=True):
        if plan in timed and isinstance(found, Rejected):
            why = f"{found.stage}: {found.reason}"
            text = f"a plan that was timed at first could not be timed beside the others: {why}"
            warn(text)


def _require_among(plans: Sequence[Plan], needed: Plan | None) -> None:
    """Raises OutOfTime if there is a plan that is needed and these do not include it."""
    if needed is not None and not any(choose_alike(needed, plan) for plan in plans):
        raise OutOfTime(NOT_COMPARED)


def _ranked(
    run: Run, plans: Sequence[Plan], timings: Sequence[Found], before: Sequence[Plan]
) -> list[Plan]:
    """The plans in the order that `rank` gives."""
    winner = fastest(plans, timings)
    if winner is None:
        raise NoViableCandidate(_why_none(run.problem, timings))
    winner = kept(before, plans, timings, winner)
    timed = sorted((t.median_us, i) for i, t in enumerate(timings) if isinstance(t, Timing))
    order = (winner, *(i for _, i in timed if i != winner))
    ranked = [replace(plans[i], origin=MEASURED) for i in order]
    run.steps.whole_us = timed[0][0]
    return [_improved(run, ranked[0], timed[0][0]), *ranked]


def _close_again(run: Run, plans: Sequence[Plan], timings: Sequence[Found]) -> list[Found]:
    """The times with further makes and rounds of those plans alone that may be the fastest: among
    ten plans they had few, and luck chose (three searches with other seeds should end alike).
    """
    arch, kind = run.space.arch, run.space.arch.kind
    found, places = list(timings), close(timings, kind)
    left_s = run.budget.left_for("ranking")
    if len(places) < 2 or left_s < policy.LEAST_RANKING_S:
        return found
    effort = run.budget.limited(compared(arch, policy.CLOSE_PART[kind] * left_s), "ranking")
    calls_us = sum(t.median_us for t in (found[i] for i in places) if isinstance(t, Timing))
    makes = makes_that_fit(kind, calls_us, effort.budget_s)
    try:
        made = whole_makes(run, [plans[i] for i in places], effort, makes)
    except OutOfTime:
        return found
    again = dict(zip(places, of_makes(made), strict=True))
    return with_more(found, again, len(made))


def _improved(run: Run, plan: Plan, call_us: float) -> Plan:
    """The plan with branches, and with the runners-up of its steps, if the whole is faster; a call
    takes about so long.
    """
    graph, space, budget = run.graph, run.space, run.budget
    left = swaps(plan, graph, space, run.steps.costs.outcomes)
    effort = replace(compared(space.arch, policy.REFINING_S), tolerance=policy.IMPROVED_TO)
    effort = budget.limited(effort, "ranking")

    def timed(plans: Sequence[Plan]) -> Sequence[Found]:
        left_s, kind = budget.left_for("ranking"), space.arch.kind
        # Of many the best are looked for; of two one is chosen.
        makes = makes_that_fit(kind, 2 * call_us, left_s) if len(plans) == 2 else 1
        return time_makes(run, plans, effort, makes)

    with suppress(OutOfTime):  # it is good as it is
        if budget.left_for("ranking") > policy.REFINING_S:
            plan = branched(plan, graph, space, timed)
        while left and budget.left_for("ranking") > policy.REFINING_S:
            run.enter("ranking")
            now, left = left[: policy.SWAPS_AT_ONCE], left[policy.SWAPS_AT_ONCE :]
            plan = improved(plan, graph, space, now, timed)
    return plan


def _why_none(problem: Problem, timings: Sequence[Found]) -> str:
    reasons = "; ".join(f"{t.stage}: {t.reason}" for t in timings if isinstance(t, Rejected))
    return f"no plan for {problem.network} at batch {problem.batch} runs here: {reasons}"
