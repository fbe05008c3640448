"""`plantune bench`: a stored plan against the framework's routes, interleaved in one run."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plantune.base.files import require_writable
from plantune.base.nearest import hint
from plantune.cli import options
from plantune.cli.attempts import Attempts
from plantune.cli.console import Console, bold, note, require_replaceable_json, write_json
from plantune.cli.exit_codes import DONE, FAILED
from plantune.cli.lookup import Chosen, chosen_plan, environment_here, require_device, worker_for
from plantune.plans.standing import PROGRAM, Standing
from plantune.plans.workload import Workload
from plantune.report import bench_text
from plantune.report.plot import FORMATS, HOW_TO_GET, bar_plot, can_plot, require_replaceable_plot
from plantune.report.progress import waiting
from plantune.report.tables import counted

if TYPE_CHECKING:
    from plantune.measure.machine_state import State
    from plantune.measure.racing.race import Race


# They try every kernel that they know: the first takes 87 to 160 s for a small network on an H200
# with 16 cores (2026-11-22).
SLOW_ROUTES = ("compile-max-autotune", "compile-best")
ROUTE_BUILD_S = 900.0


@dataclass(frozen=True)
class Wanted:
    """Which routes to run, how long, and which files to write."""

    routes: str | None
    step: bool
    budget: float
    build_limit: float | None
    seed: int
    plot: Path | None
    output: Path | None
    store: bool


@click.command(
    "bench",
    epilog=options.example(
        "plantune bench --batch 8 --plot bench.png",
        "plantune bench --batch 8 --peers eager,torchscript --json",
    ),
)
@options.common_options(json_file=True)
@options.workload_options
@click.option("--peers", "routes", metavar="A,B", help="Only these routes; all of them by default.")
@click.option("--step", is_flag=True, help="In training: whole steps, with AdamW.")
@options.budget_option(10.0, "Seconds for timing; building comes on top.")
@click.option(
    "--build-limit",
    type=options.SECONDS,
    help="Leaves out routes whose turn to be built comes later.",
)
@options.seed_option("Of weights and images.")
@click.option(
    "--plot", type=options.FILE, metavar="FILE.png", help="Draw a bar plot (needs matplotlib)."
)
@click.option(
    "--output", type=options.FILE, metavar="FILE", help="Write the JSON object to FILE too."
)
@click.option("--store", is_flag=True, help="Keep the race as the plan's evidence.")
@options.bundled(Wanted, "wanted")
def bench_command(console: Console, place: Path | None, workload: Workload, wanted: Wanted) -> None:
    """Times a stored plan against the framework's best routes.

    All routes run interleaved in one process, on the same random weights and images: calls in a row
    with the same images and with others in each call, and single calls until their result is there.
    The ratio is that of the worse of both kinds of images. Each route says whether it notices that
    weights change (live) or need not (frozen).
    """
    from plantune.cli.bench_store import require_routes, store_race
    from plantune.cli.quiet import wait_for_quiet
    from plantune.measure.machine_state import gpu_watcher, machine_for
    from plantune.search.machine_log import MachineLog
    from plantune.space.arch import load_arch

    _require_steps(wanted, workload)
    require_device(workload.arch, "measure")
    _require_files(console, wanted)
    routes = _chosen_routes(wanted.routes, workload)
    chosen = chosen_plan(place, workload)
    if wanted.store:
        require_routes(chosen, routes)
    slow = [name for name in routes if name in SLOW_ROUTES]
    if slow:
        note(f"{' and '.join(slow)} may compile for minutes; --peers leaves them out")
    machine = machine_for(load_arch(workload.arch).kind, gpu_watcher(workload.arch))
    wait_for_quiet(wanted.budget, machine)
    race, attempts = _race(chosen, routes, wanted), Attempts()
    log, id, stored = MachineLog(machine), None, ""
    state = log.snapshot("race")
    if wanted.store:
        storing = attempts.of(lambda: store_race(place, chosen, race, log))
        id, stored = storing or (None, "not stored")
    document = {**_document(chosen, race, wanted, state), "stored_plan_id": id}
    # The files first: a pipe that somebody closes ends the text.
    drawn = _write(console, wanted, document, attempts)
    _show(console, chosen, race, document, wanted.budget)
    for line in filter(None, (drawn, stored)):
        console.say(line)
    if console.json_file is None:
        console.emit(document)
    if code := attempts.code or (FAILED if stored and id is None else DONE):
        raise click.exceptions.Exit(code)


def _write(console: Console, wanted: Wanted, document: dict[str, Any], attempts: Attempts) -> str:
    """Writes the files; where the plot is, if there is one."""
    output, plot = wanted.output, wanted.plot
    if console.json_file is not None:
        attempts.of(lambda: console.emit(document))
    if output is not None:
        attempts.of(lambda: write_json(output, document))
    if plot is None:
        return ""

    def draw() -> str:
        bar_plot(document, plot)
        return f"plot: {plot}"

    return attempts.of(draw) or ""


def _require_steps(wanted: Wanted, workload: Workload) -> None:
    if wanted.step and wanted.store:
        raise click.UsageError("--store keeps a race of passes; leave out --step")
    if wanted.step and workload.mode != "train":
        raise click.UsageError("--step needs --mode train: a step is both passes and the optimizer")


def _require_files(console: Console, wanted: Wanted) -> None:
    """Before anything is timed, what would fail at the end."""
    _require_plot(wanted.plot)
    for option, path in (("--output", wanted.output), ("--json", console.json_file)):
        if path is not None:
            _require_writable(path, option)
            require_replaceable_json(path)


def _require_plot(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix.lower() not in FORMATS:
        raise click.BadParameter(
            f"{path}: the name must end in {' or '.join(FORMATS)}", param_hint="'--plot'"
        )
    _require_writable(path, "--plot")
    if not can_plot():
        raise click.UsageError(f"--plot needs matplotlib, which is not installed: {HOW_TO_GET}")
    require_replaceable_plot(path)


def _require_writable(path: Path, option: str) -> None:
    try:
        require_writable(path)
    except OSError as error:
        text = f"{path}: cannot be written: {error.strerror}"
        raise click.BadParameter(text, param_hint=f"'{option}'") from error


def _chosen_routes(text: str | None, workload: Workload) -> tuple[str, ...]:
    from plantune.measure.racing.routes import framework_routes

    known = framework_routes(workload.arch, workload.mode)
    if text is None:
        return known
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        close = hint(unknown[0], known) if unknown else ""
        what = f"no route is called {', '.join(unknown)}" if unknown else "names no route"
        raise click.BadParameter(
            f"{what}; known on {workload.arch}: {', '.join(known)}{close}", param_hint="'--peers'"
        )
    return names


def _race(chosen: Chosen, routes: tuple[str, ...], wanted: Wanted) -> Race:
    from plantune.measure.subject import Raced
    from plantune.measure.timing import Effort

    limit = wanted.build_limit
    build_until = None if limit is None else time.monotonic() + limit
    effort = Effort(budget_s=wanted.budget, build_until=build_until)
    most = "" if limit is None else f" ({limit:g} s and what is begun by then)"
    what = f"building {counted(len(routes) + 1, 'route')}{most}, then {wanted.budget:g} s of timing"
    with worker_for(chosen.workload, ROUTE_BUILD_S) as worker, waiting(sys.stderr, what):
        raced = Raced(chosen.workload.problem, chosen.workload.tape, wanted.step)
        return worker.race(raced, chosen.plan, routes, effort, wanted.seed, detailed=True)


def _document(
    chosen: Chosen, race: Race, wanted: Wanted, state: State | None = None
) -> dict[str, Any]:
    from plantune.report.bench import bench_document

    searched = chosen.plan.evidence.get("search_s") if chosen.id is not None else None
    search_s = float(searched) if isinstance(searched, (int, float)) else None
    here = environment_here(chosen.workload.arch)
    timed = {"optimizer": "AdamW"} if wanted.step else {}
    workload = {**chosen.workload.to_json(), **timed}
    same_bits = bool(chosen.plan.evidence.get("deterministic"))
    document = bench_document(race, here, workload, search_s=search_s, machine=state)
    return {**document, "deterministic": same_bits}


def _show(
    console: Console, chosen: Chosen, race: Race, document: dict[str, Any], budget_s: float
) -> None:
    route, evidence = chosen.plan.route, chosen.plan.evidence
    console.say(bold(bench_text.headline(race, route)))
    for line in bench_text.details(race, route):
        console.say(line)
    torch = document["environment"]["torch"]
    step = ", whole steps with AdamW" if "optimizer" in document["workload"] else ""
    console.say(f"{chosen.workload}{step}, {chosen.label} ({chosen.match} match), torch {torch}")
    if route != PROGRAM:
        console.say(f"in the race that decided this: {Standing.of(route, evidence).headline()}")
    console.say(bench_text.queued_table(document, console.width))
    for more in (bench_text.single_table, bench_text.parts_table):
        if (text := more(document, console.width)) is not None:
            console.say()
            console.say(text)
    for name, reason in race.failures.items():
        console.say(f"{name} did not run: {reason}")
    for line in bench_text.other_ratios(document):
        console.say(line)
    if document["deterministic"]:
        console.say("the plan gives the same bits each time, which these times include")
    for line in bench_text.advice(document, race, budget_s):
        console.say(line)
