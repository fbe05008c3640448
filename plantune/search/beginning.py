"""The first seconds of a search, in which known plans are built and timed as wholes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plantune.errors import OutOfTime
from plantune.measure.timing import Timing
from plantune.plan import Plan
from plantune.search.phases import Run, compared, time_plans
from plantune.search.ranking import affordable, distinct, is_late

# The time for known plans: a part of the budget, or these seconds if that is less.
BEGINNING, BEGINNING_S = 0.1, 8.0


@dataclass(frozen=True)
class Beginning:
    """Known plans: those that were timed, the fastest first, how long it took, and the others."""

    timed: Sequence[Plan] = ()
    untimed: Sequence[Plan] = ()
    fastest_us: float = math.inf


def begun(run: Run, known: Sequence[Plan], guess: Plan | None) -> Beginning:
    """Builds the first plan that is known, then times it beside the others for whose kernels there
    is time, and the guess: so a search that ends early has a good plan.
    """
    for first in known[:1]:
        run.steps.begin_with(first, run.budget, run.report, until_built=True)
    seconds = min(BEGINNING * run.budget.seconds, BEGINNING_S)
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
