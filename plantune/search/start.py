"""The first half of a search: what is known before, the warm start, and measuring steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from plantune.errors import OutOfTime
from plantune.measure.worker.client import Worker
from plantune.search import policy
from plantune.search.builds import Builds, builds_for
from plantune.search.contenders.contender import GUESS, Contenders
from plantune.search.contenders.elsewhere import start_all
from plantune.search.contenders.proposal import known_contenders, to_measure_first
from plantune.search.contenders.warm_start import warm_start
from plantune.search.listing import listed_steps
from plantune.search.run import Run
from plantune.search.sought import Sought

if TYPE_CHECKING:
    from plantune.search.search import Search


def measured(search: Search, workers: Sequence[Worker]) -> tuple[Run, Contenders]:
    """Measures steps until no better plan can be made of others, or the time is over: the run, and
    the plans that were known before it. Raises OutOfTime if there is none left to compare them.
    """
    sought, options = search.sought, search.options
    with builds_for(sought.space.arch, *workers) as builds:
        known = known_contenders(
            sought, search.environment, search.database, shipped=options.shipped
        )
        run = _started(search, known, builds, workers)
        run.enter("measuring")
        known = _warm(search, run, known)
        run.enter("measuring")
        for plan in to_measure_first(sought, known):
            run.steps.begin_with(plan, run.budget, run.report)
        run.steps.run(run.budget, run.report)
    state = search.log.snapshot("measuring")
    if not run.budget.left_s:
        raise OutOfTime("the time was over before anything was compared")
    return replace(run, machine=state), known


def _started(search: Search, known: Contenders, builds: Builds, workers: Sequence[Worker]) -> Run:
    """Lists all candidates and starts the workers."""
    sought, budget = search.sought, search.budget
    steps = listed_steps(search, known, builds, workers)
    worker, *others = workers
    run = Run(sought, search.options, worker, budget, steps, search.report, others)
    search.started = run
    budget.race_s = race_s(sought, steps.framework().us)
    start_all(workers, budget.cut_at("racing"))
    return run


def _warm(search: Search, run: Run, known: Contenders) -> Contenders:
    """Times the known plans: the fastest is what an early end keeps."""
    found = warm_start(run, known.plans(), known.first(GUESS))
    if found.timed:
        search.best = found.timed[0]
        run.steps.whole_us = us = found.fastest_us
        # On busy cores a call may take a hundred times what its steps are thought to take.
        run.budget.race_s = max(run.budget.race_s, race_s(run.sought, us))
    return found.marked(known)


def race_s(sought: Sought, call_us: float) -> float:
    """Roughly how long the calls of a race take."""
    calls_s = policy.CALLS_IN_A_RACE[sought.space.arch.kind] * call_us / 1e6
    return max(calls_s, policy.TRAINING_S if sought.problem.mode == "train" else 0.0)
