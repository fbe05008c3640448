"""What a search says at its end: what runs the network now and how fast, in one sentence; then the
numbers, the steps, where the plan is, and what to do next.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from plantune.cli.console import STDOUT, Console, bold, note
from plantune.cli.lookup import to_run
from plantune.devices.machine import Environment
from plantune.measure.racing.built_routes import PLANTUNE
from plantune.plans.plan import Plan
from plantune.plans.standing import EAGER, Standing
from plantune.plans.workload import Workload
from plantune.plans.written_words import ROUTE
from plantune.report.progress import stage_text
from plantune.report.tables import counted
from plantune.search.keeping import KeepingDatabase

if TYPE_CHECKING:
    from plantune.search.results import Result


# What a budget that was too short should be at least, and how many times longer.
ENOUGH_S, LONGER = 60.0, 5
# Waiting for another search of the same plan is not part of the budget; it is mentioned if it takes
# this long.
LONG_WAIT_S = 1.5


def longer_s(budget_s: float) -> float:
    """The budget to advise after one that was too short."""
    return max(ENOUGH_S, LONGER * budget_s)


def tried_text(result: Result, seconds: float) -> str:
    """How much was measured, and how to go on if there was no time for the rest."""
    took = f"{seconds:.0f} s"
    if (waiting := seconds - result.spent_s) >= LONG_WAIT_S:
        took += f", {waiting:.0f} of them spent waiting for another search"
    counts = f"{result.measured} measured, {result.rejected} rejected"
    text = f"{result.measured + result.rejected} of {result.candidates} candidates: {counts}"
    if result.exhausted or not result.complete:
        return f"{text}, {took}"
    longer = f"search again to go on, or --budget {longer_s(result.budget_s):g}"
    return f"{text}, {took}; for others there was no time: {longer}"


def phases_text(result: Result) -> str:
    """What each stage took; nothing of what was over at once."""
    took_long = ((stage, took) for stage, took in result.stages_s.items() if took >= 0.5)
    return ", ".join(f"{stage_text(stage)} {took:.0f} s" for stage, took in took_long)


IN_MEMORY = "there is no writable plan database"


def show_result(
    console: Console,
    workload: Workload,
    result: Result,
    keeping: KeepingDatabase,
    environment: Environment,
    seconds: float,
) -> None:
    """Text and JSON. A plan that could not be kept is printed, alone, so that it is not lost."""
    say = note if keeping.plan_id is None and result.nothing_left is None else console.say
    for line in _lines(workload, result, keeping, seconds):
        say(line)
    console.emit(_document(workload, result, keeping, environment, seconds))
    if is_lost(result, keeping) and console.json != STDOUT:
        console.print(result.plan.dumps())


def is_lost(result: Result, keeping: KeepingDatabase) -> bool:
    """Whether a plan was found and could not be stored."""
    found = result.known is None and result.nothing_left is None
    return found and keeping.plan_id is None


def families(plan: Plan) -> dict[str, int]:
    """How many steps each kernel family runs, the most first."""
    return dict(Counter(choice.candidate.family for choice in plan.choices).most_common())


def families_text(plan: Plan) -> str:
    named = ", ".join(f"{count} {family}" for family, count in families(plan).items())
    return f"{counted(len(plan.choices), 'step')}: {named}"


def _lines(
    workload: Workload, result: Result, keeping: KeepingDatabase, seconds: float
) -> list[str]:
    standing = Standing.of(result.plan.route, result.plan.evidence)
    details = standing.details()
    if result.complete:
        first = standing.headline(result.unraced)
    else:
        first, details = interrupted_text(result), details if result.race is not None else []
    lines = [bold(first), *_times(result, standing.shown), *details, *_why_so(result, standing)]
    if result.plan.choices:
        lines += [*result.notes, families_text(result.plan), tried_text(result, seconds)]
    lines += filter(None, [phases_text(result)])
    return [*lines, *where_kept(workload, result, keeping)]


def interrupted_text(result: Result) -> str:
    if result.race is None:
        return "interrupted: this is the best plan so far, not yet raced"
    return "interrupted: this plan got through its race, and runs from now on"


def _times(result: Result, shown: str) -> list[str]:
    """How long a call takes, beside eager's; of another search's race, there."""
    if result.race is None:
        ms = result.plan.evidence.get("median_ms") if result.elsewhere else None
        return [f"{ms:.3f} ms a call there"] if isinstance(ms, (int, float)) else []
    timings, eager = result.race.timings, result.race.timings.get(EAGER)
    ours_ms = timings.get(shown, timings[PLANTUNE]).median_us / 1e3
    if eager is None or shown == EAGER:
        return [f"{ours_ms:.3f} ms a call"]
    return [f"{ours_ms:.3f} ms a call, eager {eager.median_us / 1e3:.3f} ms"]


def _why_so(result: Result, standing: Standing) -> list[str]:
    """Which routes did not race; or why there was no race, where the first line does not say it."""
    if result.race is not None:
        return [f"{name} did not run: {why}" for name, why in result.race.failures.items()]
    if result.elsewhere:
        return ["ranked and raced by another search, proved here"]
    return [result.unraced] if result.unraced and standing.is_known else []


def where_kept(workload: Workload, result: Result, keeping: KeepingDatabase) -> list[str]:
    """Where the plan is, and what to do next."""
    search = to_run("search", workload, keeping.path)
    longer = f"next: {search} --budget {longer_s(result.budget_s):g}"
    if result.known is not None:
        return [longer]
    if result.nothing_left is not None and keeping.plan_id is None:
        return []
    if keeping.plan_id is None:
        taker = "load_model" if workload.factory is None else "optimize"
        return [
            f"the plan could not be stored: {keeping.fault or IN_MEMORY}",
            f"it follows on stdout; plantune.{taker}(plan=...) takes such a file",
        ]
    place = f"plan {keeping.plan_id} in {keeping.path}"
    if result.nothing_left is not None:
        return [place]
    if result.complete and result.race is None and not result.elsewhere:
        return [place, longer]
    bench = to_run("bench", workload, keeping.path)
    return [place, f"next: {bench if result.complete else search}"]


def _document(
    workload: Workload,
    result: Result,
    keeping: KeepingDatabase,
    environment: Environment,
    seconds: float,
) -> dict[str, Any]:
    kept = keeping.plan_id is not None
    return {
        "workload": workload.to_json(),
        "environment": environment.to_json(),
        "complete": result.complete,
        "plan_id": keeping.plan_id,
        "database": str(keeping.path) if kept else None,
        "why_not_stored": str(keeping.fault or IN_MEMORY) if is_lost(result, keeping) else None,
        ROUTE: result.plan.route,
        "branches": result.plan.branches,
        "evidence": dict(result.plan.evidence),
        "families": families(result.plan),
        "measured": result.measured,
        "rejected": result.rejected,
        "candidates": result.candidates,
        "exhausted": result.exhausted,
        "raced": result.race is not None,
        "elsewhere": result.elsewhere,
        "notes": list(result.notes),
        "phases_s": {stage: round(took, 3) for stage, took in result.stages_s.items()},
        "seconds": round(seconds, 3),
        "plan": result.plan.to_json(),
    }
