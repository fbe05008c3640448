"""`plantune search`: finds the fastest plan on this machine and keeps it."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from plantune.base.warning import warn
from plantune.cli import options
from plantune.cli.checks import no_compiler_line
from plantune.cli.console import Console, note
from plantune.cli.exit_codes import FAILED, INTERRUPTED, NoUsableDevice
from plantune.cli.hints import Whole
from plantune.cli.interrupts import interrupts, undisturbed
from plantune.cli.lookup import database, require_device
from plantune.cli.root import BEGAN
from plantune.errors import NoPlanLeft
from plantune.plans.workload import Workload
from plantune.report.progress import ProgressLine
from plantune.report.tables import machine_text

if TYPE_CHECKING:
    from plantune.devices.gpus import Slot
    from plantune.search.keeping import KeepingDatabase
    from plantune.search.results import Progress, SearchOptions

NOTHING = "interrupted before anything was measured; nothing was saved"


@dataclass(frozen=True)
class How:
    """How to search, as the options say it."""

    budget: float
    resume: bool
    seed: int
    dry_run: bool
    predict: bool
    storage: str | None = field(repr=False)
    heartbeat: int
    status: str | None = field(repr=False)
    gpus: tuple[int, ...] | None
    wait: bool
    shipped: bool

    @property
    def fresh(self) -> bool:
        return not self.resume

    @property
    def wait_s(self) -> float:
        """The other search may have its whole budget, and some time for what it overruns."""
        return 2 * self.budget + 120 if self.wait else 0.0


@click.command(
    "search",
    epilog=options.example(
        "plantune search --batch 8", "plantune search --model resnet18 --batch 1 --budget 300"
    ),
)
@options.common_options()
@options.workload_options
@options.budget_option(90.0, "Seconds for the whole search.")
@click.option(
    "--resume/--fresh",
    "resume",
    default=True,
    help="Use what earlier searches measured here, or measure everything again.",
)
@options.seed_option("Of every random draw.")
@click.option("--dry-run", is_flag=True, help="Show what would be tried, and how long at most.")
@click.option("--predict", is_flag=True, help="Plan for a GPU that is not here, without measuring.")
@click.option(
    "--storage",
    metavar="URL",
    envvar="PLANTUNE_STORAGE",
    help="Database in which searches on any hosts share one Optuna study; PLANTUNE_STORAGE.",
)
@click.option(
    "--heartbeat",
    type=Whole(1, 3600),
    default=10,
    help="Seconds between signs of life in --storage; after six of them a silent search is over.",
)
@click.option(
    "--status",
    is_flag=False,
    flag_value="",
    metavar="[URL]",
    help="Show what searches do in a shared storage, that of PLANTUNE_STORAGE by default; no more.",
)
@click.option(
    "--gpus",
    type=options.GPUS,
    help="GPUs of one kind that measure beside each other: all, or numbers such as 0,1.",
)
@click.option(
    "--wait/--no-wait", default=True, help="Wait for another search of the same plan, or exit 75."
)
@click.option(
    "--shipped/--no-shipped",
    default=True,
    help="Begin from plans that plantune ships and from those of other machines too.",
)
@options.bundled(How, "how")
def search_command(console: Console, place: Path | None, workload: Workload, how: How) -> None:
    """Finds the fastest plan on this machine, proves it and keeps it.

    Ctrl-C keeps the best plan so far (exit 7); the next search goes on from there.
    """
    if how.status is not None:
        from plantune.cli.status import show_status

        if not (url := how.status or how.storage):
            raise click.UsageError("--status needs a URL: give one, or set PLANTUNE_STORAGE")
        show_status(console, url)
        return
    _require_measurable(workload, how)
    if how.dry_run:
        from plantune.cli.dry_run import show_dry_run

        show_dry_run(console, place, workload, how.budget)
    elif how.predict:
        from plantune.cli.predict import predict

        predict(console, place, workload, how.budget)
    else:
        _search(console, place, workload, how)


def _require_measurable(workload: Workload, how: How) -> None:
    if how.predict and workload.arch == "cpu":
        raise click.UsageError("--predict needs the arch of a GPU, such as --arch sm80")
    if how.predict:
        return
    try:
        require_device(workload.arch, "measure")
    except NoUsableDevice as error:
        raise NoUsableDevice(f"{error}; --predict plans for {workload.arch} unmeasured") from error


def _search(console: Console, place: Path | None, workload: Workload, how: How) -> None:
    from plantune.cli.quiet import wait_for_quiet
    from plantune.cli.search_report import is_lost, show_result
    from plantune.measure.machine_state import Machine, gpu_watcher
    from plantune.search.keeping import KeepingDatabase
    from plantune.search.session import Manner, search_plan
    from plantune.search.shared.slots import environment_on
    from plantune.search.sought import Sought

    began: float = click.get_current_context().meta[BEGAN]
    with interrupts() as stop, database(place, read_only=False) as opened:
        keeping = KeepingDatabase(opened, lambda text: note(f"warning: {text}"))
        slots = _slots(workload, how)
        environment = environment_on(slots, workload.arch)
        beside = f", {len(slots)} of them" if len(slots) > 1 else ""
        note(f"{workload}; {machine_text(environment.to_json())}{beside}; {how.budget:g} s")
        if (hint := no_compiler_line(workload.arch)) is not None:
            note(hint)
        sought = Sought(workload.graph, workload.problem, workload.tape)
        spent_s = time.monotonic() - began
        options = replace(_options(keeping, how, slots), spent_s=spent_s)
        with ProgressLine(sys.stderr) as line:

            def report(progress: Progress) -> None:
                stop.check()
                line(progress)

            def saving() -> AbstractContextManager[None]:
                line.end()
                return undisturbed()

            def quiet() -> None:
                gpu = slots[0].gpu if slots else None
                wait_for_quiet(how.budget, Machine(gpu=gpu_watcher(workload.arch, gpu)))

            manner = Manner(report, _say, how.wait_s, saving, quiet)
            try:
                result = search_plan(sought, options, keeping, environment, manner)
            except KeyboardInterrupt as error:
                raise click.ClickException(NOTHING) from error
    if result.nothing_left is not None:
        warn(str(result.unraced), NoPlanLeft)
    show_result(console, workload, result, keeping, environment, time.monotonic() - began)
    if is_lost(result, keeping):
        raise click.exceptions.Exit(FAILED)
    if not result.complete:
        raise click.exceptions.Exit(INTERRUPTED)


def _say(text: str) -> None:
    note(text if text.startswith("waiting") else f"warning: {text}")


def _slots(workload: Workload, how: How) -> tuple[Slot, ...]:
    """Where workers measure; none if that was not asked for."""
    from plantune.devices.gpus import slots_of
    from plantune.space.arch import load_arch

    if how.gpus is None:
        return ()
    if workload.arch == "cpu":
        raise click.UsageError("--gpus needs the arch of a GPU; give --arch too")
    return slots_of(load_arch(workload.arch), how.gpus or None)


def _options(keeping: KeepingDatabase, how: How, slots: tuple[Slot, ...]) -> SearchOptions:
    from plantune.cli.storage import storage_for
    from plantune.search.results import Patience, SearchOptions
    from plantune.search.shared.rdb import is_shareable

    storage = storage_for(how.storage, keeping.path, how.seed)
    shared = how.storage is not None and storage is not None and is_shareable(storage)
    return SearchOptions(
        how.budget,
        how.seed,
        how.fresh,
        storage,
        shipped=how.shipped,
        slots=slots,
        patience=Patience(how.heartbeat) if shared else None,
    )
