"""`plantune verify`: a stored plan's numbers and speed, checked again here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plantune.cli.console import Console, bold
from plantune.cli.exit_codes import VerifyFailed
from plantune.cli.lookup import (
    Chosen,
    chosen_plan,
    database,
    environment_here,
    require_device,
    require_match,
    worker_for,
)
from plantune.cli.options import Key, Seconds, common_options, example, key_options
from plantune.errors import WrongResult
from plantune.report.bench_text import verdict
from plantune.report.tables import config_text, counted, table, us_text

if TYPE_CHECKING:
    from plantune.graph.step import Step
    from plantune.kernels.family import Candidate
    from plantune.measure.client import Worker
    from plantune.measure.outcome import Outcome
    from plantune.measure.race import Race

ID = click.IntRange(min=1)
# Their numbers were right; only their times are worth nothing.
TIMING_STAGES = ("noisy", "roofline")
STEP_BUDGET_S = 0.05


@click.command("verify", epilog=example("plantune verify --batch 8", "plantune verify 3"))
@common_options()
@key_options
@click.argument("id", type=ID, required=False)
@click.option(
    "--budget",
    type=Seconds(),
    default=5.0,
    show_default=True,
    help="Seconds for timing the whole against eager.",
)
def verify_command(
    console: Console, place: Path | None, key: Key, id: int | None, budget: float
) -> None:
    """Checks a stored plan's numbers and speed again here.

    Each step is checked against float64, then the whole network, which is then raced with eager.
    The plan is the one for the options, or the one with this ID. Exit 5 if a number is wrong. One
    that was predicted, or measured elsewhere, is kept as measured here.
    """
    require_device(key.arch, "verify")
    chosen = chosen_plan(place, key, id)
    require_match(chosen)
    _say_match(console, chosen)
    from plantune.measure.timing import Effort

    with worker_for(chosen.problem) as worker:
        rows = _checked_steps(console, worker, chosen)
        race = worker.race(chosen.problem, chosen.plan, ("eager",), Effort(budget_s=budget))
    console.say(bold(f"{counted(len(rows), 'step')} and the whole are right; {verdict(race)}"))
    measured = _measured(console, place, chosen, race)
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


def _measured(console: Console, place: Path | None, chosen: Chosen, race: Race) -> int | None:
    """Keeps a plan that was not measured here as one that is from now on; gives its new id."""
    from plantune.proofs import remember_proof
    from plantune.search.judgement import judged_alone

    here = environment_here(chosen.plan.arch)
    predicted = chosen.plan.origin == "predicted"
    if chosen.match == "exact" and not predicted:
        remember_proof(chosen.plan, here)
        return None
    plan = judged_alone(replace(chosen.plan, origin="measured"), race)
    with database(place, read_only=False) as opened:
        id = opened.put_plan(plan, here)
    remember_proof(plan, here)
    before = "predicted" if predicted else "made elsewhere"
    console.say(f"{chosen.label} was {before}; it is kept as plan {id}, which is measured here")
    return id


def _say_match(console: Console, chosen: Chosen) -> None:
    console.say(f"{chosen.label}, made elsewhere" if chosen.match != "exact" else chosen.label)
    differences = environment_here(chosen.plan.arch).differences(chosen.environment)
    for name, (here, there) in differences.items():
        console.say(f"  {name}: {there} there, {here} here")


def _checked_steps(console: Console, worker: Worker, chosen: Chosen) -> list[dict[str, Any]]:
    """Checks each distinct step; raises WrongResult or VerifyFailed after all were tried."""
    from plantune.report.steps import plan_steps

    steps = plan_steps(chosen.plan, chosen.problem.graph)
    distinct = {(step.signature, candidate): (step, candidate) for step, candidate in steps}
    rows = []
    for step, candidate in distinct.values():
        rows.append(_row(step, candidate, _outcome(worker, step, candidate, chosen.plan.arch)))
    cells = [[r["step"], r["candidate"], us_text(r["median_us"]), r["result"]] for r in rows]
    console.say(table(["step", "candidate", "median", "result"], cells, "llrl"))
    _raise_first(rows)
    return rows


def _outcome(worker: Worker, step: Step, candidate: Candidate, arch: str) -> Outcome:
    from plantune.measure.timing import Effort

    return worker.check_and_time(step, candidate, arch, Effort(budget_s=STEP_BUDGET_S))


def _row(step: Step, candidate: Candidate, outcome: Outcome) -> dict[str, Any]:
    from plantune.measure.outcome import Measured

    row: dict[str, Any] = {
        "step": step.name,
        "candidate": config_text(candidate.family, candidate.config),
        "stage": None,
        "median_us": None,
        "error": None,
        "bound": None,
    }
    if isinstance(outcome, Measured):
        result = f"right: error {outcome.error:.1e}, allowed {outcome.bound:.1e}"
        numbers = {"error": outcome.error, "bound": outcome.bound}
        return {**row, **numbers, "median_us": outcome.median_us, "result": result}
    reason = " ".join(outcome.reason.split())
    return {**row, "stage": outcome.stage, "result": f"{outcome.stage}: {reason}"}


def _raise_first(rows: list[dict[str, Any]]) -> None:
    """Wrong numbers before whatever else is wrong."""
    failed = [row for row in rows if row["stage"] not in (None, *TIMING_STAGES)]
    wrong = [row for row in failed if row["stage"] == "numerics"]
    for row in (*wrong, *failed):
        text = f"step {row['step']} with {row['candidate']}: {row['result']}; search again"
        raise WrongResult(text, 0.0, 0.0) if row["stage"] == "numerics" else VerifyFailed(text)
