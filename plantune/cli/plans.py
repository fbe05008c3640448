"""`plantune plans`: what is stored - list, show, diff, export, rm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plantune.base.files import require_replaceable, write_whole
from plantune.cli.console import Console, bold
from plantune.cli.exports import summary_of
from plantune.cli.hints import Commands
from plantune.cli.lookup import database, environment_here, stored_plan
from plantune.cli.merge import merge_command
from plantune.cli.options import FILE, ID, ModelName, common_options, example, from_option
from plantune.errors import InvalidPlan
from plantune.plans.raced_routes import NO_COMPILED, UNKNOWN, RacedRoutes
from plantune.plans.standing import PROGRAM, Standing
from plantune.plans.written_words import BEST_ROUTE, ROUTE
from plantune.report.tables import config_text

if TYPE_CHECKING:
    from plantune.plans.database.rows import StoredPlan

TITLES = ["id", "model", "batch", "mode", "dtype", "arch", "ms", "ratio", "of", "here", "status"]
FROM = "from"
OF = TITLES.index("of")
OWN = "own"
# Beside the other route of a ratio that is not to torch.compile's, by whether that is known.
MARKS = {True: "", False: "*", None: "?"}
FOOTNOTES = {"*": NO_COMPILED, "?": UNKNOWN}


@click.group("plans", cls=Commands, epilog=example("plantune plans list"))
def plans_command() -> None:
    """Lists, shows, compares, exports and removes stored plans."""


@plans_command.command("list", epilog=example("plantune plans list --model resnet18"))
@common_options()
@click.option("--model", type=ModelName(), help="Only plans of this network.")
@click.option("--all", "every", is_flag=True, help="Partial plans and earlier ones too.")
@from_option
def list_command(console: Console, place: Path | None, model: str | None, every: bool) -> None:
    """Lists the newest complete plan of each problem and environment, your own first, then the
    team's, which PLANTUNE_PLANS or --from name.
    """
    with database(place) as opened:
        listed = [Listed(item, OWN) for item in _chosen(opened.plans(), model, every)]
        path = opened.path
    listed += _of_team(model, every)
    rows = [_cells(item) for item in listed]
    if rows:
        shared = any(item.place != OWN for item in listed)
        titles = [*TITLES, FROM] if shared else TITLES
        console.table(titles, [row[: len(titles)] for row in rows], "rlrlllrrllll"[: len(titles)])
        for line in _footnotes(rows):
            console.say(line)
    else:
        console.say(f"{path}: no plans; run plantune search, or plantune plans list --all")
    console.emit({"database": str(path), "plans": [item.summary() for item in listed]})


@dataclass(frozen=True)
class Listed:
    """A stored plan, and where it is: your own database, or the file that has it."""

    stored: StoredPlan
    place: str

    @property
    def match(self) -> str:
        return environment_here(self.stored.plan.problem.arch).match(self.stored.environment)

    def summary(self) -> dict[str, Any]:
        summary = _summary(self.stored, self.match)
        id = self.stored.id if self.place == OWN else None
        return {**summary, "id": id, "from": self.place}


def _of_team(model: str | None, every: bool) -> list[Listed]:
    from plantune.plans.database.stored import plans_of_team

    by_file: dict[Path, list[StoredPlan]] = {}
    for path, item in plans_of_team():
        by_file.setdefault(path, []).append(item)
    return [
        Listed(item, str(path))
        for path, stored in by_file.items()
        for item in _chosen(stored, model, every)
    ]


def _chosen(stored: Iterable[StoredPlan], model: str | None, every: bool) -> list[StoredPlan]:
    from plantune.plans.database.rows import newest_complete

    wanted = [item for item in stored if model in (None, item.plan.problem.network)]
    return wanted if every else list(newest_complete(wanted).values())


def _cells(listed: Listed) -> list[str]:
    item, plan = listed.stored, listed.stored.plan
    ms, ratio = plan.evidence.get("median_ms"), plan.evidence.get("ratio")
    raced = isinstance(ratio, (int, float))
    mark = MARKS[RacedRoutes.of(plan.evidence).compiled]
    return [
        str(item.id) if listed.place == OWN else "-",
        plan.problem.network,
        str(plan.problem.batch),
        plan.problem.mode,
        plan.problem.dtype,
        plan.problem.arch,
        f"{ms:.3f}" if isinstance(ms, (int, float)) else "-",
        f"{ratio:.3f}" if raced else "-",
        f"{plan.evidence.get(BEST_ROUTE)}{mark}" if raced else "-",
        listed.match,
        _state(item),
        listed.place,
    ]


def _footnotes(rows: list[list[str]]) -> list[str]:
    used = {row[OF][-1] for row in rows}
    return [f"{mark} {text}" for mark, text in FOOTNOTES.items() if mark in used]


def _state(item: StoredPlan) -> str:
    """What it is, and who runs the network if one of the framework's routes was faster."""
    plan = item.plan
    route = "" if plan.route == PROGRAM else f", run by {plan.route}"
    return f"{item.status}, {plan.origin}{route}"


def _summary(item: StoredPlan, match: str) -> dict[str, Any]:
    return {
        "id": item.id,
        **summary_of(item.plan),
        ROUTE: item.plan.route,
        "branches": item.plan.branches,
        "status": item.status,
        "match": match,
        "created_at": item.created_at,
        **RacedRoutes.of(item.plan.evidence).to_json(),
    }


@plans_command.command("show", epilog=example("plantune plans show 3"))
@common_options()
@click.argument("id", type=ID)
def show_command(console: Console, place: Path | None, id: int) -> None:
    """Shows the steps, the evidence and the environment of the plan with this ID."""
    with database(place) as opened:
        item = stored_plan(opened, id)
    plan, here = item.plan, environment_here(item.plan.problem.arch)
    match = here.match(item.environment)
    console.say(bold(f"plan {id}: {plan.problem}"))
    if plan.problem.call is not None:
        console.say(plan.problem.call_text)
    console.say(f"{_state(item)}, made {item.created_at}; a match here: {match}")
    for name, (got, saved) in here.differences(item.environment).items():
        console.say(f"  {name}: {saved} there, {got} here")
    standing = Standing.of(plan.route, plan.evidence)
    for line in (standing.headline(), *standing.details()):
        console.say(line)
    console.say("".join(f"  {key} {value}\n" for key, value in plan.evidence.items()).rstrip())
    rows = [[config_text(c.candidate), " ".join(c.nodes)] for c in plan.choices]
    console.table(["candidate", "covers"], rows, "ll")
    document = {"environment": item.environment.to_json(), "plan": plan.to_json()}
    console.emit({**_summary(item, match), **document})


@plans_command.command("diff", epilog=example("plantune plans diff 1 3"))
@common_options()
@click.argument("first", type=ID)
@click.argument("second", type=ID)
def diff_command(console: Console, place: Path | None, first: int, second: int) -> None:
    """Shows what changed from the plan with the id FIRST to the one with SECOND."""
    from plantune.report.difference import difference, difference_text

    with database(place) as opened:
        found = difference(stored_plan(opened, first), stored_plan(opened, second))
    console.say(difference_text(found, console.width))
    console.emit({"first": first, "second": second, **found})


@plans_command.command("export", epilog=example("plantune plans export 3 > plan.json"))
@common_options()
@click.argument("id", type=ID)
@click.argument("file", type=FILE, required=False)
def export_command(console: Console, place: Path | None, id: int, file: Path | None) -> None:
    """Prints the plan with this ID as JSON, or writes it to FILE.

    `plantune.load_model` and `plantune.optimize` take such a file as `plan`.
    """
    with database(place) as opened:
        plan = stored_plan(opened, id).plan
    if file is None:
        console.print(plan.dumps())
        return
    require_replaceable(file, "a plan", _is_plan)
    write_whole(file, (plan.dumps() + "\n").encode())
    console.say(f"{file}: plan {id}, {plan.problem}")
    console.emit({"file": str(file), "plan_id": id})


def _is_plan(content: bytes) -> bool:
    """Whether these bytes are an earlier plan."""
    from plantune.plans.plan import Plan

    try:
        Plan.loads(content.decode())
    except (UnicodeDecodeError, InvalidPlan):
        return False
    return True


@plans_command.command("rm", epilog=example("plantune plans rm 1 2"))
@common_options()
@click.argument("ids", metavar="ID...", type=ID, nargs=-1, required=True)
def rm_command(console: Console, place: Path | None, ids: tuple[int, ...]) -> None:
    """Removes the plans with these ids. What was measured for them stays."""
    wanted = tuple(dict.fromkeys(ids))
    with database(place, read_only=False) as opened:
        for id in wanted:  # all of them exist, or none is removed
            stored_plan(opened, id)
        for id in wanted:
            opened.remove_plan(id)
    console.say(f"removed: {', '.join(map(str, wanted))}")
    console.emit({"removed": list(wanted)})


plans_command.add_command(merge_command)
