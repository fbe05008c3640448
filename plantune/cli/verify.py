"""`plantune verify`: a stored plan's numbers and speed, checked again here."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plantune.cli.console import Console, bold
from plantune.cli.exit_codes import VerifyFailed
from plantune.cli.lookup import Chosen, database, environment_here, plan_to_run, worker_for
from plantune.cli.options import budget_option, common_options, example, plan_options
from plantune.errors import WrongResult
from plantune.plans.workload import Workload
from plantune.plans.written_words import MEASURED, PREDICTED
from plantune.report.bench_text import details, headline
from plantune.report.progress import StatusLine, waiting
from plantune.report.tables import config_text, counted, us_text

if TYPE_CHECKING:
    from plantune.base.outcome import Outcome
    from plantune.graph.step import Step
    from plantune.kernels.family import Candidate
    from plantune.measure.racing.race import Race
    from plantune.measure.worker.client import Worker

RIGHT, WRONG, UNCHECKED = "right", "wrong", "not checked"
STEP_BUDGET_S = 0.05


@click.command("verify", epilog=example("plantune verify --batch 8", "plantune verify 3"))
@common_options()
@plan_options
@budget_option(5.0, "Seconds for timing the whole against eager.")
def verify_command(
    console: Console, place: Path | None, workload: Workload, id: int | None, budget: float
) -> None:
    """Checks a stored plan's numbers and speed again here.

    Each step is checked against float64, then the whole network, which is then raced with eager.
    The plan is the one for the options, or the one with this ID. Exit 5 if a number is wrong. One
    that was predicted, measured elsewhere, or found by --from, is kept as measured here.
    """
    chosen = plan_to_run(place, workload, id, "verify")
    from plantune.measure.subject import Raced
    from plantune.measure.timing import Effort

    with worker_for(chosen.workload) as worker:
        rows = _checked_steps(worker, chosen)
        if any(row["numbers"] != RIGHT for row in rows):
            _say_match(console, chosen)
            _show_steps(console, rows)
        _raise_first(rows)
        with waiting(sys.stderr, "racing the whole network with eager"):
            raced = Raced(chosen.workload.problem, chosen.workload.tape)
            race = worker.race(raced, chosen.plan, ("eager",), Effort(budget_s=budget))
    measured = _measured(place, chosen, race)
    route = chosen.plan.route
    for line in (bold(headline(race, route)), _summary(rows), *details(race, route)):
        console.say(line)
    _say_match(console, chosen)
    if measured is not None:
        console.say(
            f"{chosen.label} was {_before(chosen)}; it is kept as plan {measured}, which is "
            "measured here"
        )
    _show_steps(console, rows)
    console.emit({**_document(chosen, rows, race), "measured_plan_id": measured})


def _document(chosen: Chosen, rows: list[dict[str, Any]], race: Race) -> dict[str, Any]:
    return {
        "plan_id": chosen.id,
        "match": chosen.match,
        "steps": rows,
        "median_ms": {name: timing.median_us / 1e3 for name, timing in race.timings.items()},
        "ratio": None if race.ratio is None else vars(race.ratio),
        "saved": dict(chosen.plan.evidence),
    }


def _measured(place: Path | None, chosen: Chosen, race: Race) -> int | None:
    """Keeps a plan that was not measured here, or is in a file of others, as one that is from now
    on; gives its new id.
    """
    from plantune.plans.database.proofs import remember_proof
    from plantune.search.contenders.judgement import judged_alone

    here = environment_here(chosen.workload.arch)
    if chosen.id is not None and chosen.match == "exact" and chosen.plan.origin != PREDICTED:
        remember_proof(chosen.plan, here)
        return None
    choices = tuple(replace(choice, times=None) for choice in chosen.plan.choices)
    plan = judged_alone(replace(chosen.plan, origin=MEASURED, choices=choices), race)
    with database(place, read_only=False) as opened:
        id = opened.put_plan(plan, here)
    remember_proof(plan, here)
    return id


def _before(chosen: Chosen) -> str:
    if chosen.plan.origin == PREDICTED:
        return "predicted"
    return "made elsewhere" if chosen.match != "exact" else "in another file"


def _say_match(console: Console, chosen: Chosen) -> None:
    console.say(f"{chosen.label}, made elsewhere" if chosen.match != "exact" else chosen.label)
    differences = environment_here(chosen.workload.arch).differences(chosen.environment)
    for name, (here, there) in differences.items():
        console.say(f"  {name}: {there} there, {here} here")


def _checked_steps(worker: Worker, chosen: Chosen) -> list[dict[str, Any]]:
    """Checks each distinct step."""
    from plantune.measure.timing import Effort
    from plantune.report.steps import plan_steps

    effort = Effort(budget_s=STEP_BUDGET_S)
    steps = plan_steps(chosen.plan, chosen.workload.graph)
    distinct = {(step.signature, candidate): (step, candidate) for step, candidate in steps}
    rows = []
    with StatusLine(sys.stderr) as line:
        for number, (step, candidate) in enumerate(distinct.values(), 1):
            line.show(f"checking step {number} of {len(distinct)}: {step.name}")
            outcome = worker.check_and_time(step, candidate, chosen.workload.arch, effort)
            rows.append(_row(step, candidate, outcome))
    return rows


def _show_steps(console: Console, rows: list[dict[str, Any]]) -> None:
    cells = [
        [r["step"], r["candidate"], r["numbers"], us_text(r["median_us"]), r["result"]]
        for r in rows
    ]
    console.table(["step", "candidate", "numbers", "median", "result"], cells, "lllrl")


def _summary(rows: list[dict[str, Any]]) -> str:
    """Of rows none of which is wrong."""
    untimed = sum(row["median_us"] is None for row in rows)
    text = f"the numbers of {counted(len(rows), 'step')} and of the whole are right"
    return text + (f", {counted(untimed, 'step')} could not be timed" if untimed else "")


def _row(step: Step, candidate: Candidate, outcome: Outcome) -> dict[str, Any]:
    from plantune.base.outcome import Measured
    from plantune.report.reasons import TIMING_STAGES, rejected_text

    row: dict[str, Any] = {
        "step": step.name,
        "candidate": config_text(candidate),
        "numbers": RIGHT,
        "stage": None,
        "median_us": None,
        "error": None,
        "bound": None,
    }
    if isinstance(outcome, Measured):
        result = f"error {outcome.error:.1e}, allowed {outcome.bound:.1e}"
        numbers = {"error": outcome.error, "bound": outcome.bound}
        return {**row, **numbers, "median_us": outcome.median_us, "result": result}
    if outcome.stage not in TIMING_STAGES:
        row["numbers"] = WRONG if outcome.stage == "numerics" else UNCHECKED
    return {**row, "stage": outcome.stage, "result": rejected_text(outcome, None)}


def _raise_first(rows: list[dict[str, Any]]) -> None:
    """Raises for the first step that failed; wrong numbers come before other failures."""
    wrong = [row for row in rows if row["numbers"] == WRONG]
    for row in (*wrong, *(row for row in rows if row["numbers"] == UNCHECKED)):
        text = f"step {row['step']} with {row['candidate']}: {row['result']}; search again"
        raise WrongResult(text, 0.0, 0.0) if row["numbers"] == WRONG else VerifyFailed(text)
