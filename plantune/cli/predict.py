"""`plantune search --predict`: a plan for a chip that is not here, marked as predicted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from plantune.base.outcome import Rejected
from plantune.cli.console import STDOUT, Console, bold, note
from plantune.cli.interrupts import interrupts
from plantune.cli.lookup import database, to_run
from plantune.devices.gpus import device_for, later_gpu
from plantune.devices.machine import Environment, predicted_environment
from plantune.errors import UnsupportedDevice
from plantune.graph.step import Step
from plantune.kernels.cuda.cuda_family import why_not_portable
from plantune.kernels.family import Candidate
from plantune.plans.precisions import trial_key
from plantune.plans.workload import Workload
from plantune.report.tables import bytes_text, config_text, counted, table, us_text
from plantune.search.keeping import KeepingDatabase
from plantune.search.predict import Check, Predictor
from plantune.search.predicted import PredictedStep, Prediction
from plantune.space.arch import Arch, load_arch

REASON_LENGTH = 160


def predict(console: Console, place: Path | None, workload: Workload, budget_s: float) -> None:
    """Compiles for its arch, ranks by guesses, and keeps the plan."""
    start = time.monotonic()
    arch = load_arch(workload.arch)
    environment = predicted_environment(workload.arch)
    note(
        f"{workload}; {environment.device}, {environment.compiler}; {budget_s:g} s; "
        "nothing is measured"
    )
    with suppress(UnsupportedDevice):
        device_for(arch)
        note(f"a GPU of {workload.arch} is here: without --predict, a search measures on it")
    with interrupts() as stop, database(place, read_only=False) as opened:
        keeping = KeepingDatabase(opened, lambda text: note(f"warning: {text}"))

        def say(text: str) -> None:
            stop.check()
            note(text)

        try:
            with _checking(arch) as (check, numerics):
                note(f"numerics {numerics}")
                predictor = Predictor(
                    workload.graph,
                    workload.problem,
                    budget_s,
                    check=check,
                    numerics=numerics,
                    say=say,
                )
                prediction = predictor.run()
        except KeyboardInterrupt as error:
            raise click.ClickException(
                "interrupted before the plan was complete; nothing was saved"
            ) from error
        _keep(keeping, prediction, environment)
    _show(console, workload, prediction, keeping)
    data = _document(workload, prediction, keeping, environment)
    console.emit({**data, "seconds": round(time.monotonic() - start, 3)})
    if keeping.plan_id is None:
        if console.json != STDOUT:
            console.print(prediction.plan.dumps())
        raise click.exceptions.Exit(1)


@contextmanager
def _checking(arch: Arch) -> Iterator[tuple[Check | None, str]]:
    """A check of a kernel's numbers on a later GPU, if there is one, and what to say of it."""
    device, reason = later_gpu(arch), why_not_portable(arch)
    if device is None or reason is not None:
        why = reason or "there is no GPU of a later arch here to run them"
        yield None, f"not checked: {why}"
        return
    import torch

    from plantune.measure.worker.client import Worker

    name = torch.cuda.get_device_name(device.place)
    with Worker() as worker:

        def check(step: Step, candidate: Candidate) -> Rejected | None:
            return worker.check_elsewhere(step, candidate, arch.name)

        yield check, f"checked on {name} through PTX"


def _keep(keeping: KeepingDatabase, prediction: Prediction, environment: Environment) -> None:
    for step, candidate, rejected in prediction.rejected:
        keeping.put_trial(trial_key(step, environment.arch), candidate, environment, rejected)
    keeping.put_plan(prediction.plan, environment)


def _show(
    console: Console, workload: Workload, prediction: Prediction, keeping: KeepingDatabase
) -> None:
    say = note if keeping.plan_id is None else console.say
    titles = ["step", "kernel", "guess", "threads", "registers", "shared"]
    guess_us = 1e3 * float(prediction.plan.evidence["predicted_ms"])
    say(bold(f"PREDICTED for {workload.arch}: {us_text(guess_us)} a call, a guess from datasheets"))
    say(table(titles, [_cells(row) for row in prediction.steps], "llrrrr", console.width))
    for text, steps in _refusals(prediction).items():
        say(f"rejected for {counted(steps, 'step')}: {text}")
    say(
        f"{counted(len(prediction.steps), 'step')}; {prediction.built} kernels compiled, "
        f"{len(prediction.rejected)} rejected; numerics {prediction.plan.evidence['numerics']}"
    )
    if keeping.plan_id is None:
        say(f"the plan could not be stored: {keeping.fault or 'no database'}")
    else:
        say(f"plan {keeping.plan_id} in {keeping.path}")
        verify = to_run("verify", workload, keeping.path)
        say(f"next: {verify}, on a GPU of {workload.arch}")


def _refusals(prediction: Prediction) -> Counter[str]:
    """What was refused and why, with the number of steps for which it was."""
    return Counter(
        f"{config_text(candidate)}: {rejected.stage}: "
        + " ".join(rejected.reason.split())[:REASON_LENGTH]
        for _, candidate, rejected in prediction.rejected
    )


def _cells(row: PredictedStep) -> list[str]:
    used = row.footprint
    return [
        row.step.name,
        config_text(row.candidate),
        us_text(row.estimate_us),
        *(["-"] * 3 if used is None else map(str, (used.threads, used.registers))),
        *([] if used is None else [bytes_text(used.shared_bytes)]),
    ]


def _document(
    workload: Workload, prediction: Prediction, keeping: KeepingDatabase, environment: Environment
) -> dict[str, Any]:
    plan, kept = prediction.plan, keeping.plan_id is not None
    return {
        "workload": workload.to_json(),
        "environment": environment.to_json(),
        "origin": plan.written_origin,
        "plan_id": keeping.plan_id,
        "database": str(keeping.path) if kept else None,
        "evidence": dict(plan.evidence),
        "steps": [
            {
                "step": row.step.name,
                "nodes": [node.name for node in row.step.nodes],
                **row.candidate.to_json(),
                "guess_us": row.estimate_us,
                "footprint": None if row.footprint is None else vars(row.footprint),
            }
            for row in prediction.steps
        ],
        "rejected": [
            {"step": step.name, **candidate.to_json(), **vars(rejected)}
            for step, candidate, rejected in prediction.rejected
        ],
        "plan": plan.to_json(),
    }
