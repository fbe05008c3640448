"""Times whole plans in turns, some of them made several times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plantune.base.outcome import Rejected
from plantune.errors import MeasureTimeout, WorkerDied
from plantune.measure.timing import LEAST_SAMPLES, Effort, Timing
from plantune.plans.plan import Plan
from plantune.search import policy
from plantune.search.contenders.comparison import evened, of_makes, whole
from plantune.search.run import Run
from plantune.space.arch import Arch

Found = Timing | Rejected


def time_plans(run: Run, plans: Sequence[Plan], effort: Effort) -> list[Found]:
    """All plans in turns, without the machine's slow spells; if one crashes the worker, each alone,
    then the survivors in turns.
    """
    graph, seed = run.graph, run.options.seed
    try:
        return evened(run.worker.time_programs(graph, plans, effort, seed=seed))
    except (MeasureTimeout, WorkerDied) as error:
        if len(plans) == 1:
            return [Rejected("crash", str(error))]
    short = replace(effort, budget_s=policy.ALONE_S)
    alone = [time_plans(run, [plan], short)[0] for plan in plans]
    survivors = [p for p, found in zip(plans, alone, strict=True) if isinstance(found, Timing)]
    try:
        together = (
            run.worker.time_programs(graph, survivors, effort, seed=seed) if survivors else ()
        )
    except (MeasureTimeout, WorkerDied):  # their times alone say less, but what they are
        return alone
    timings = iter(evened(together))
    return [next(timings) if isinstance(found, Timing) else found for found in alone]


def compared(arch: Arch, seconds: float) -> Effort:
    """Plans in turns for so long and no longer: to repeat what slow spells of the machine made
    noisy left no time for the plans that may be the fastest, and took 23 of 60 s on a busy machine
    before anything was measured (2 cores, 2026-11-23).
    """
    known_to = policy.RANKED_TO[arch.kind]
    return Effort(budget_s=seconds, tolerance=known_to, retries=0, relative=True)


def makes_that_fit(kind: str, calls_us: float, seconds: float) -> int:
    """How often plans are made whose calls take so long together: the rounds that are timed in any
    case, with two calls of each make, should fit into these seconds.
    """
    round_s = 2 * LEAST_SAMPLES * calls_us / 1e6
    return max(1, min(policy.MAKES[kind], int(seconds / round_s)))


def time_makes(run: Run, plans: Sequence[Plan], effort: Effort, makes: int) -> list[Found]:
    """All plans in turns, each with the rounds of so many makes of it, which count alike."""
    return of_makes(whole_makes(run, plans, effort, makes))


def whole_makes(
    run: Run, plans: Sequence[Plan], effort: Effort, makes: int
) -> Sequence[Sequence[Found]]:
    found = time_plans(run, [*plans] * makes, effort)
    return whole([found[i : i + len(plans)] for i in range(0, len(found), len(plans))])
