"""`plantune profile`: where the framework spends its time, and what of it a plan removed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plantune.cli.console import Console, bold
from plantune.cli.lookup import (
    Chosen,
    chosen_plan,
    database,
    environment_here,
    require_device,
    require_match,
    worker_for,
)
from plantune.cli.options import Key, common_options, example, key_options
from plantune.report.tables import percent, table, us_text

if TYPE_CHECKING:
    from plantune.measure.client import Worker
    from plantune.plan import Plan
    from plantune.plan_db import PlanDatabase
    from plantune.report.layers import LayerTime, StepTime, Timed

ID = click.IntRange(min=1)
STEP_BUDGET_S = 0.1
WHOLE_BUDGET_S = 3.0
RUNS = 25


@click.command(
    "profile",
    epilog=example("plantune profile --batch 8", "plantune profile --model resnet18 --levels"),
)
@common_options()
@key_options
@click.argument("id", type=ID, required=False)
@click.option("--fresh", is_flag=True, help="Measure every step now, whatever is stored.")
@click.option("--levels", is_flag=True, help="What each level of fusion costs instead.")
def profile_command(
    console: Console, place: Path | None, key: Key, id: int | None, fresh: bool, levels: bool
) -> None:
    """Shows where the framework's time goes, and what a plan removed.

    The framework's ops and the plan's steps are timed one by one, in the same way; what a search
    measured here already is not measured again. With --levels whole passes are timed: nothing
    fused, convolutions with ever more behind them, and the plan.
    """
    require_device(key.arch, "measure")
    chosen = chosen_plan(place, key, id)
    require_match(chosen)
    if levels:
        _profile_levels(console, chosen)
        return
    from plantune.report.layers import by_layer, by_step

    with worker_for(chosen.problem) as worker, database(place) as opened:
        stored = None if fresh else opened
        framework = _timed(worker, stored, chosen, _framework_plan(chosen))
        planned = _timed(worker, stored, chosen, chosen.plan)
        whole = _whole(worker, chosen)
    layers, steps = by_layer(framework), by_step(planned, framework)
    document = _document(chosen, framework, planned, whole)
    _show(console, layers, steps, document)
    told = {"layers": [vars(layer) for layer in layers], "steps": [s.to_json() for s in steps]}
    console.emit({**document, **told})


def _profile_levels(console: Console, chosen: Chosen) -> None:
    """A row for each level of fusion, the median of RUNS runs."""
    from plantune.report.levels import level_row, levels, levels_table

    if chosen.plan.mode == "train":
        raise click.UsageError("--levels tells of inference; a plan for training has no norms left")
    rows = []
    with worker_for(chosen.problem) as worker:
        for level in levels(chosen.problem, chosen.plan):
            rows.append(level_row(level, worker.pass_cost(level.graph, level.plan, RUNS)))
    console.say(levels_table(rows, console.width))
    console.say(f"medians of {RUNS} passes, one by one; CPU time is until the call returns")
    console.emit({"plan_id": chosen.id, "match": chosen.match, "levels": rows})


def _framework_plan(chosen: Chosen) -> Plan:
    from plantune.planning import default_plan
    from plantune.space.search_space import load_search_space

    problem = chosen.problem
    return default_plan(problem.graph, load_search_space(problem.arch), network=problem.network)


def _timed(worker: Worker, stored: PlanDatabase | None, chosen: Chosen, plan: Plan) -> Timed:
    """Each step of a plan with its time; None where it could not be timed."""
    from plantune.measure.outcome import Measured
    from plantune.measure.timing import Effort
    from plantune.report.steps import plan_steps

    times: dict[Any, float | None] = {}
    steps = plan_steps(plan, chosen.problem.graph)
    here = environment_here(plan.arch)
    for step, candidate in steps:
        if (step.signature, candidate) in times:
            continue
        known = stored.trials(step.signature, here) if stored is not None else {}
        outcome = known.get(candidate)
        if not isinstance(outcome, Measured):
            effort = Effort(budget_s=STEP_BUDGET_S)
            outcome = worker.check_and_time(step, candidate, plan.arch, effort)
        found = outcome.median_us if isinstance(outcome, Measured) else None
        times[step.signature, candidate] = found
    return [(step, candidate, times[step.signature, candidate]) for step, candidate in steps]


def _whole(worker: Worker, chosen: Chosen) -> tuple[float | None, float | None]:
    """The framework op by op and the plan, each as a whole program, in turns."""
    from plantune.measure.timing import Effort, Timing

    plans = [_framework_plan(chosen), chosen.plan]
    timed = worker.time_programs(chosen.problem.graph, plans, Effort(budget_s=WHOLE_BUDGET_S))
    first, second = (item.median_us if isinstance(item, Timing) else None for item in timed)
    return first, second


def _document(
    chosen: Chosen, framework: Timed, planned: Timed, whole: tuple[float | None, float | None]
) -> dict[str, Any]:
    from plantune.report.layers import total_us

    return {
        "plan_id": chosen.id,
        "match": chosen.match,
        "framework_us": total_us(framework),
        "plan_us": total_us(planned),
        "framework_whole_us": whole[0],
        "plan_whole_us": whole[1],
    }


def _show(
    console: Console, layers: list[LayerTime], steps: list[StepTime], document: dict[str, Any]
) -> None:
    total = document["framework_us"] or 1.0
    console.say(bold("The framework's own kernels, by layer"))
    rows = [
        [layer.layer, us_text(layer.framework_us), percent(layer.framework_us / total),
         ", ".join(layer.ops)] for layer in layers
    ]  # fmt: skip
    console.say(table(["layer", "time", "part", "ops"], rows, "lrrl"))
    console.say()
    console.say(bold("What the plan made of it, by its steps"))
    rows = [
        [step.layers[0] + (f" +{len(step.layers) - 1}" if step.layers[1:] else ""),
         str(len(step.ops)), us_text(step.framework_us), us_text(step.plan_us),
         us_text_signed(step.removed_us), step.candidate] for step in steps
    ]  # fmt: skip
    titles = ["layers", "ops", "framework", "plan", "removed", "candidate"]
    console.say(table(titles, rows, "lrrrrl"))
    console.say(
        f"sum of steps: framework {us_text(document['framework_us'])}, "
        f"plan {us_text(document['plan_us'])}; as whole programs: "
        f"{us_text(document['framework_whole_us'])} and {us_text(document['plan_whole_us'])}"
    )


def us_text_signed(us: float | None) -> str:
    return us_text(us) if us is None or us >= 0 else f"-{us_text(-us)}"
