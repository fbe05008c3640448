"""`plantune export` and `plantune import`: plans as small files to commit and share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plantune.cli.console import Console
from plantune.cli.hints import Choice
from plantune.cli.lookup import database
from plantune.cli.options import PATH, ModelName, common_options, example
from plantune.errors import PlantuneError
from plantune.report.tables import counted
from plantune.space.arch import ARCH_NAMES

if TYPE_CHECKING:
    from plantune.plans.plan import Plan


@click.command("export", epilog=example("plantune export plans/cpu.db"))
@common_options()
@click.argument("file", type=PATH)
@click.option(
    "--arch",
    type=Choice(ARCH_NAMES),
    help="Kind of processor; by default FILE's name if it is one, else cpu.",
)
@click.option("--model", type=ModelName(), help="Only plans of this network.")
def export_command(
    console: Console, place: Path | None, file: Path, arch: str | None, model: str | None
) -> None:
    """Writes plans to FILE, to commit and share.

    They are the newest complete ones of each problem and environment: parameters and evidence,
    nothing that is executed.
    """
    from plantune.plans.database.exports import export_plans

    arch = arch or (file.stem if file.stem in ARCH_NAMES else "cpu")
    with database(place) as opened:
        plans = export_plans(opened, file, arch, network=model)
    console.say(f"{file}: {counted(len(plans), 'plan')} for {arch}, {file.stat().st_size} bytes")
    _report(console, file, plans)


@click.command("import", epilog=example("plantune import plans/cpu.db"))
@common_options()
@click.argument("file", type=PATH)
def import_command(console: Console, place: Path | None, file: Path) -> None:
    """Adds the plans of an exported FILE.

    All of them or none, after every value in it was checked.
    """
    from plantune.plans.database.exports import import_plans, read_export
    from plantune.plans.database.plan_database import lies_in_file

    if not os.path.lexists(file):
        raise click.BadParameter(f"{file}: is not there", param_hint="'FILE'")
    read_export(file)  # before a database is made for what may be refused
    with database(place, read_only=False) as opened:
        plans = import_plans(file, opened)
        kept = lies_in_file(opened.path, *plans)
    if not kept:
        raise PlantuneError(f"{file}: is right, but {opened.path} cannot be written; give --db")
    console.say(f"{file}: {counted(len(plans), 'plan')} read")
    _report(console, file, plans)


def _report(console: Console, file: Path, plans: tuple[Plan, ...]) -> None:
    for plan in plans:
        console.say(f"  {plan.problem}")
    console.emit({"file": str(file), "plans": [summary_of(plan) for plan in plans]})


def summary_of(plan: Plan) -> dict[str, Any]:
    """A plan without its choices, as JSON; its call is null if that was not kept."""
    return {
        "call": None,
        **plan.problem.to_json(),
        "origin": plan.written_origin,
        "steps": len(plan.choices),
        "evidence": dict(plan.evidence),
    }
