"""`plantune plans merge`: joins plan files, and decides where they disagree."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plantune.cli.console import Console, note
from plantune.cli.exports import summary_of
from plantune.cli.lookup import environment_here
from plantune.cli.options import FILE, SECONDS, common_options, example
from plantune.errors import PlantuneError
from plantune.plans.workload import Workload
from plantune.report.tables import counted

if TYPE_CHECKING:
    from plantune.plans.database.merging import Conflict
    from plantune.plans.database.rows import Key, StoredPlan


@click.command("merge", epilog=example("plantune plans merge team.db anna.db ben.db --race"))
@common_options()
@click.argument("out", type=FILE)
@click.argument("files", metavar="FILE...", type=FILE, nargs=-1, required=True)
@click.option("--race", is_flag=True, help="Where files disagree, keep what is faster here.")
@click.option("--budget", type=SECONDS, default=2.0, help="Seconds for each race.")
def merge_command(
    console: Console,
    place: Path | None,
    out: Path,
    files: tuple[Path, ...],
    race: bool,
    budget: float,
) -> None:
    """Joins the plans of each FILE into OUT, which others can share or import.

    Of different plans for one problem and environment the first FILE's stays, unless they race,
    which only plans that were measured on a machine like this one can.
    """
    from plantune.base.paths import database_path
    from plantune.plans.database.exports import write_export
    from plantune.plans.database.merging import merged

    for file in files:
        if not os.path.lexists(file):
            raise click.BadParameter(f"{file}: is not there", param_hint="'FILE...'")
    found = merged(files)
    winners: dict[Key, StoredPlan] = {}
    for conflict in found.conflicts:
        winner = _raced(conflict, budget) if race else None
        if winner is not None:
            winners[conflict.key] = winner
    plans = found.decided(winners)
    write_export(out, plans, place or database_path())
    console.say(f"{out}: {counted(len(plans), 'plan')} of {counted(len(files), 'file')}")
    for conflict in found.conflicts:
        console.say(_line(conflict, winners))
    conflicts = [_document(conflict, winners) for conflict in found.conflicts]
    summaries = [summary_of(item.plan) for item in plans]
    console.emit({"file": str(out), "plans": summaries, "conflicts": conflicts})


def _raced(conflict: Conflict, budget_s: float) -> StoredPlan | None:
    """The fastest plan here; None, with a note, if they cannot race here."""
    from plantune.cli.lookup import worker_for
    from plantune.measure.timing import Effort
    from plantune.plans.plan import is_for, named_as
    from plantune.search.contenders.comparison import fastest

    first = conflict.plans[0].stored
    problem = first.plan.problem
    if environment_here(problem.arch).match(first.environment) != "exact":
        note(f"not raced: {problem}: this machine is not like {first.environment.device}")
        return None
    try:
        workload = Workload.of(problem)
        plans = [item.stored.plan for item in conflict.plans]
        if not all(is_for(plan, workload.graph) for plan in plans):
            note(f"not raced: {problem}: its layers are not those of {problem.network} here")
            return None
        named = [named_as(plan, workload.graph) for plan in plans]
        with worker_for(workload) as worker:
            timings = worker.time_programs(workload.graph, named, Effort(budget_s=budget_s))
    except PlantuneError as error:
        note(f"not raced: {problem}: {error}")
        return None
    index = fastest(named, timings)
    return None if index is None else conflict.plans[index].stored


def _line(conflict: Conflict, winners: dict[Key, StoredPlan]) -> str:
    document = _document(conflict, winners)
    how = "it won the race" if document["raced"] else "the first"
    others = ", ".join(path for path in document["files"] if path != document["kept"])
    return f"  conflict: {conflict.key[0]}: kept that of {document['kept']} ({how}), not {others}"


def _document(conflict: Conflict, winners: dict[Key, StoredPlan]) -> dict[str, Any]:
    winner = winners.get(conflict.key)
    kept = next((s for s in conflict.plans if s.stored is winner), conflict.plans[0])
    return {
        "problem": str(conflict.key[0]),
        "device": kept.stored.environment.device,
        "files": [str(item.path) for item in conflict.plans],
        "kept": str(kept.path),
        "raced": winner is not None,
    }
