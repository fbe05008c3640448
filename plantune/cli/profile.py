"""`plantune profile`: where the framework spends its time, and what a plan saves of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plantune.cli.console import Console, bold
from plantune.cli.lookup import Chosen, database, environment_here, plan_to_run, worker_for
from plantune.cli.options import common_options, example, plan_options
from plantune.plans.workload import Workload
from plantune.report.progress import StatusLine, waiting
from plantune.report.tables import and_more, counted, percent, us_text

if TYPE_CHECKING:
    from plantune.measure.worker.client import Worker
    from plantune.plans.database.plan_database import PlanDatabase
    from plantune.plans.plan import Plan
    from plantune.report.layers import LayerTime, StepTime, Timed

STEP_BUDGET_S = 0.1
WHOLE_BUDGET_S = 3.0
RUNS = 25


@click.command(
    "profile",
    epilog=example("plantune profile --batch 8", "plantune profile --model resnet18 --levels"),
)
@common_options()
@plan_options
@click.option("--fresh", is_flag=True, help="Measure every step now, whatever is stored.")
@click.option("--levels", is_flag=True, help="What each level of fusion costs instead.")
def profile_command(
    console: Console,
    place: Path | None,
    workload: Workload,
    id: int | None,
    fresh: bool,
    levels: bool,
) -> None:
    """Shows where the framework's time goes, and what a plan saves of it.

    The framework's ops and the plan's steps are timed one by one, in the same way; what a search
    measured here already is not measured again. With --levels whole passes are timed: nothing
    fused, convolutions fused with more and more of what follows, and the plan.
    """
    chosen = plan_to_run(place, workload, id, "measure")
    if levels:
        _profile_levels(console, chosen)
        return
    from plantune.report.layers import by_layer, by_step

    with worker_for(chosen.workload) as worker, database(place) as opened:
        stored = None if fresh else opened
        framework = _timed(worker, stored, chosen, _framework_plan(chosen))
        planned = _timed(worker, stored, chosen, chosen.plan)
        with waiting(sys.stderr, "timing both as whole programs"):
            whole = _whole(worker, chosen)
    layers, steps = by_layer(framework), by_step(planned, framework)
    document = _document(chosen, framework, planned, steps, whole)
    _show(console, layers, steps, document)
    rows = {"layers": [vars(layer) for layer in layers], "steps": [s.to_json() for s in steps]}
    console.emit({**document, **rows})


def _profile_levels(console: Console, chosen: Chosen) -> None:
    """A row for each level of fusion, the median of RUNS runs."""
    from plantune.report.levels import level_row, levels, levels_table

    if chosen.workload.mode == "train":
        raise click.UsageError("--levels tells of inference; a plan for training has no norms left")
    rows = []
    with worker_for(chosen.workload) as worker:
        for level in levels(chosen.workload, chosen.plan):
            with waiting(sys.stderr, f"timing passes, fusion {level.name}"):
                cost = worker.pass_cost(level.graph, level.plan, RUNS)
            rows.append(level_row(level, cost))
    console.say(levels_table(rows, console.width))
    console.say(f"medians of {RUNS} passes, one by one; CPU time is until the call returns")
    console.emit({"plan_id": chosen.id, "match": chosen.match, "levels": rows})


def _framework_plan(chosen: Chosen) -> Plan:
    from plantune.plans.guess import framework_plan
    from plantune.space.search_space import load_search_space

    workload = chosen.workload
    space = load_search_space(workload.arch)
    return framework_plan(workload.graph, space, network=workload.network)


def _timed(worker: Worker, stored: PlanDatabase | None, chosen: Chosen, plan: Plan) -> Timed:
    """Each step of a plan with its time, measured here or stored."""
    from plantune.base.outcome import Measured
    from plantune.measure.timing import Effort
    from plantune.plans.precisions import trial_key
    from plantune.report.layers import MeasuredStep
    from plantune.report.steps import plan_steps

    outcomes: dict[Any, Any] = {}
    effort = Effort(budget_s=STEP_BUDGET_S)
    steps = plan_steps(plan, chosen.workload.graph)
    here = environment_here(plan.problem.arch)
    with StatusLine(sys.stderr) as line:
        for number, (step, candidate) in enumerate(steps, 1):
            line.show(f"timing step {number} of {len(steps)}: {step.name}", plan.origin)
            key = step.signature, candidate
            if key not in outcomes:
                stored_as = trial_key(step, here.arch)
                known = stored.trials(stored_as, here) if stored is not None else {}
                outcomes[key] = known.get(candidate)
            if not isinstance(outcomes[key], Measured):
                outcomes[key] = worker.check_and_time(step, candidate, here.arch, effort)
    return [MeasuredStep(step, c, outcomes[step.signature, c]) for step, c in steps]


def _whole(worker: Worker, chosen: Chosen) -> tuple[float | None, float | None]:
    """The framework call by call and the plan, each as a whole program, in turns."""
    from plantune.measure.timing import Effort, Timing

    plans = [_framework_plan(chosen), chosen.plan]
    timed = worker.time_programs(chosen.workload.graph, plans, Effort(budget_s=WHOLE_BUDGET_S))
    first, second = (item.median_us if isinstance(item, Timing) else None for item in timed)
    return first, second


def _document(
    chosen: Chosen,
    framework: Timed,
    planned: Timed,
    steps: list[StepTime],
    whole: tuple[float | None, float | None],
) -> dict[str, Any]:
    """The sums are those of the steps of which both times are known."""
    from plantune.report.layers import compared, untimed

    return {
        "plan_id": chosen.id,
        "match": chosen.match,
        **compared(steps),
        "framework_whole_us": whole[0],
        "plan_whole_us": whole[1],
        "not_timed": untimed(framework, planned),
    }


def _show(
    console: Console, layers: list[LayerTime], steps: list[StepTime], document: dict[str, Any]
) -> None:
    console.say(_sums_text(len(steps), document))
    console.say()
    console.say(bold("The framework's own kernels, by layer"))
    total = sum(layer.framework_us or 0.0 for layer in layers)
    rows = [
        [layer.layer, us_text(layer.framework_us), _part(layer.framework_us, total),
         ", ".join(layer.ops)] for layer in layers
    ]  # fmt: skip
    console.table(["layer", "time", "part", "ops"], rows, "lrrl")
    console.say()
    console.say(bold("What the plan made of it, by its steps"))
    rows = [
        [and_more(step.layers), str(len(step.ops)), us_text(step.framework_us),
         us_text(step.plan_us), us_text(step.removed_us), step.candidate] for step in steps
    ]  # fmt: skip
    console.table(["layers", "ops", "framework", "plan", "removed", "candidate"], rows, "lrrrrl")
    for name, reason in document["not_timed"].items():
        console.say(f"not timed: {name}: {reason}")


def _sums_text(steps: int, document: dict[str, Any]) -> str:
    compared = document["compared_steps"]
    of = counted(steps, "step") if compared == steps else f"the {compared} of {steps} steps timed"
    return (
        f"sum of {of}: framework {us_text(document['framework_us'])}, "
        f"plan {us_text(document['plan_us'])}; as whole programs: "
        f"{us_text(document['framework_whole_us'])} and {us_text(document['plan_whole_us'])}"
    )


def _part(us: float | None, total_us: float) -> str:
    return "-" if us is None or not total_us else percent(us / total_us)
