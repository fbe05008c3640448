"""The first seconds of a search, in which known plans are built and timed as wholes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plantune.errors import OutOfTime
from plantune.graph import Graph
from plantune.measure.timing import Timing
from plantune.plan import Plan
from plantune.search.candidates import LONG_BUILD_S, StepCandidate, candidates_of
from plantune.search.phases import Run, compared, time_plans
from plantune.search.ranking import affordable, distinct, is_late
from plantune.space import SearchSpace

# The time for known plans: a part of the budget, or these seconds if that is less.
BEGINNING, BEGINNING_S = 0.1, 8.0
# The part of the time in which the first one should be built: other plans may need none of its
# kernels.
BUILDING = 0.75


@dataclass(frozen=True)
class Beginning:
    """Known plans: those that were timed, the fastest first, how long it took, and the others."""

    timed: Sequence[Plan] = ()
    untimed: Sequence[Plan] = ()
    fastest_us: float = math.inf


def built_first(plan: Plan, graph: Graph, space: SearchSpace) -> list[StepCandidate]:
    """What is built of a known plan before all else: what takes long is left to later, as in any
    other plan, or to the worker if there is time.
    """
    return [c for c in candidates_of(plan, graph, space) if c.build_s < LONG_BUILD_S]


def begun(run: Run, known: Sequence[Plan], guess: Plan | None) -> Beginning:
    """Builds the first plan that is known, then times it beside the others for whose kernels there
    is time, and the guess: so a search that ends early has a good plan.
    """
    seconds = min(BEGINNING * run.budget.seconds, BEGINNING_S)
    plans = []
    if known and _is_built(run, known[0]):
        plans = affordable(known, run.graph, run.space, run.steps, 2 * seconds)
    # Calls would build the guess, too: without a plan they use it.
    plans = distinct([*plans, *filter(None, [guess])])
    if not plans:
        return Beginning(untimed=known)
    run.tell("timing known plans")
    effort = run.budget.limited(compared(run.space.arch, seconds), "measuring")
    try:
        timings = time_plans(run, plans, effort)
    except OutOfTime:  # then they wait for the ranking
        return Beginning(untimed=known)
    order = sorted((t.median_us, i) for i, t in enumerate(timings) if isinstance(t, Timing))
    others = [plan for plan in known if plan not in plans]
    others += [plan for plan, found in zip(plans, timings, strict=True) if is_late(found)]
    fastest_us = min((us for us, _ in order), default=math.inf)
    return Beginning([plans[i] for _, i in order], others, fastest_us)


def _is_built(run: Run, plan: Plan) -> bool:
    """Whether all those kernels of a plan are built in a part of the time. Meanwhile its steps are
    measured, unless builds would be paused for that.
    """
    builds, budget, known = run.steps.builds, run.budget, run.steps.costs.knows
    # What an earlier search measured is in the caches of the disk.
    kernels = [c for c in built_first(plan, run.graph, run.space) if not known(c)]
    least_s = (1 - BUILDING) * budget.left_for("measuring")

    def left_s() -> float:
        return max(budget.left_for("measuring") - least_s, 0.0)

    def is_done() -> bool:
        return all(map(builds.is_ready, kernels))

    if builds.paused and not is_done():
        run.tell("building a known plan")
        return all(builds.wait([kernel], left_s()) for kernel in kernels)
    run.steps.begin_with(plan, budget, run.report, lambda: is_done() or not left_s())
    return is_done()
