"""The warm start of a search: known plans are built and timed as wholes in its first seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plantune.errors import OutOfTime
from plantune.graph import Graph
from plantune.measure.timing import Timing
from plantune.plans.plan import Plan
from plantune.plans.planner.candidates import LONG_BUILD_S, StepCandidate, candidates_of
from plantune.search import policy
from plantune.search.contenders.affordable import affordable
from plantune.search.contenders.comparison import is_late
from plantune.search.contenders.contender import FASTEST, TIMED, UNTIMED, Contenders, distinct
from plantune.search.contenders.timing import compared, time_plans
from plantune.search.run import Run
from plantune.space import SearchSpace


@dataclass(frozen=True)
class WarmStart:
    """Known plans: those that were timed, the fastest first, how long it took, and the others."""

    timed: Sequence[Plan] = ()
    untimed: Sequence[Plan] = ()
    fastest_us: float = math.inf

    def marked(self, known: Contenders) -> Contenders:
        """The known plans with what became of them."""
        timed = known.marked(TIMED, self.timed).marked(FASTEST, self.timed[:1])
        return timed.marked(UNTIMED, self.untimed)


def quick_kernels(plan: Plan, graph: Graph, space: SearchSpace) -> list[StepCandidate]:
    """What is built of a known plan before all else: what takes long is left to later, as in any
    other plan, or to the worker if there is time.
    """
    return [c for c in candidates_of(plan, graph, space) if c.build_s < LONG_BUILD_S]


def warm_start(run: Run, known: Sequence[Plan], guess: Plan | None) -> WarmStart:
    """Builds the nearest plan that is known, then times it beside the others for whose kernels
    there is time, and the guess: so a search that ends early has a good plan.
    """
    budget = run.budget
    seconds = min(policy.COMPARING * budget.seconds, policy.COMPARING_S)
    in_time = bool(known) and _built_in_time(run, known[0])
    # Where the first one is not built, only those that lack nothing.
    for_others_s = min(2 * seconds, budget.left_for("measuring") / 2) if in_time else 0.0
    plans = affordable(known, run.graph, run.space, run.steps, for_others_s)
    # Calls would build the guess, too: without a plan they use it.
    plans = distinct([*plans, *filter(None, [guess])])
    if not plans:
        return WarmStart(untimed=known)
    run.enter("timing known plans")
    effort = budget.limited(compared(run.space.arch, seconds), "measuring")
    try:
        timings = time_plans(run, plans, effort)
    except OutOfTime:  # then they wait for the ranking
        return WarmStart(untimed=known)
    order = sorted((t.median_us, i) for i, t in enumerate(timings) if isinstance(t, Timing))
    others = [plan for plan in known if plan not in plans]
    others += [plan for plan, found in zip(plans, timings, strict=True) if is_late(found)]
    fastest_us = min((us for us, _ in order), default=math.inf)
    return WarmStart([plans[i] for _, i in order], others, fastest_us)


def _built_in_time(run: Run, plan: Plan) -> bool:
    """Builds what is quick to build of a plan, in a part of the time: whether that was enough.
    Meanwhile its steps are measured, unless builds pause for that.
    """
    builds, budget, knows = run.steps.builds, run.budget, run.steps.costs.knows
    # What an earlier search measured is most likely in the caches of the disk.
    kernels = [c for c in quick_kernels(plan, run.graph, run.space) if not knows(c)]
    whole_s = budget.left_for("measuring")
    most_s = policy.BUILDING * whole_s
    end_s = whole_s - (min(most_s, policy.BUILDING_S) if builds.pauses else most_s)

    def left_s() -> float:
        return max(budget.left_for("measuring") - end_s, 0.0)

    def is_done() -> bool:
        return all(map(builds.is_ready, kernels))

    if not builds.pauses:
        run.steps.begin_with(plan, budget, run.report, lambda: is_done() or not left_s())
    builds.want(kernels)
    while not is_done() and left_s():
        run.enter("building a known plan")
        missing = [c for c in kernels if not builds.is_ready(c)]
        builds.wait(missing, min(policy.SIGN_OF_LIFE_S, left_s()))
    return is_done()
