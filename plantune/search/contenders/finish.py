"""What a plan is kept with after its race: who runs it, its evidence, the times of its steps."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from plantune.base.canonical import Attrs
from plantune.errors import MeasureTimeout, OutOfTime, WorkerDied
from plantune.plans.plan import Plan
from plantune.search.contenders.choice import Winner
from plantune.search.contenders.judgement import (
    TimedPairs,
    evidence_of,
    judged,
    pairs_of,
    plain_graph,
    race_notes,
    with_all_rounds,
)
from plantune.search.contenders.kept_times import is_deterministic, with_times
from plantune.search.contenders.racing import race_again
from plantune.search.machine_log import MachineLog
from plantune.search.run import Run


def decided(run: Run, winner: Winner, log: MachineLog) -> tuple[Winner, list[str]]:
    """The winner after more rounds where it is open who is faster, and what is to be said of it."""
    state = log.snapshot("race")
    pairs = race_again(run, winner.plan, winner.race)
    race = with_all_rounds(winner.race, pairs)
    plan = finished(run, Winner(winner.plan, race), log, pairs).plan
    with suppress(MeasureTimeout, OutOfTime, WorkerDied):  # it is as good without them
        plan = _with_times(run, plan)
    notes = race_notes(race, run.steps.best(), run.steps.framework(), state)
    return Winner(plan, race), notes


def finished(run: Run, winner: Winner, log: MachineLog, pairs: TimedPairs | None = None) -> Winner:
    """With the plan's evidence, and who runs it; by all `pairs`, else by the first race alone."""
    graph, space = run.graph, run.space
    captured = plain_graph(graph, space, network=run.problem.network)
    race = winner.race
    plan = replace(winner.plan, evidence=evidence_of(race))
    plan = judged(plan, pairs_of(race) if pairs is None else pairs, captured)
    same = is_deterministic(plan, graph, space, run.steps.costs.outcomes)
    found = {"deterministic": int(same), "search_s": round(run.budget.spent_s, 1)}
    plan = replace(plan, evidence=Attrs({**plan.evidence, **found, **log.evidence()}))
    return Winner(plan, race)


def _with_times(run: Run, plan: Plan) -> Plan:
    """The plan with what was measured of its steps."""
    outcomes, rooflines = run.steps.costs.outcomes, run.worker.rooflines
    arch = run.problem.arch
    return with_times(plan, run.graph, run.space, outcomes, lambda s: rooflines(s, arch))
