"""`plantune search`: finds the fastest plan on this machine and keeps it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from plantune.cli.checks import no_compiler_line
from plantune.cli.console import Console, note
from plantune.cli.exit_codes import FAILED, INTERRUPTED, NoUsableDevice
from plantune.cli.interrupts import Interrupts, interrupts, undisturbed
from plantune.cli.lookup import database, environment_here, require_device, worker_for
from plantune.cli.options import (
    budget_option,
    bundled,
    common_options,
    example,
    seed_option,
    workload_options,
)
from plantune.errors import (
    Busy,
    DatabaseUnavailable,
    MeasureTimeout,
    UnsupportedDevice,
    WorkerDied,
    WorkerFailed,
)
from plantune.report.progress import ProgressLine
from plantune.report.tables import machine_text
from plantune.workload import Workload

if TYPE_CHECKING:
    from plantune.cli.keeping import KeepingDatabase
    from plantune.machine import Environment
    from plantune.plan_db.database import PlanDatabase
    from plantune.plan_db.leases import Lease
    from plantune.search.results import Progress, Result, Settings
    from plantune.search.search import Search

BEAT_S = 10.0
# What ends a search and leaves what it measured as good as it was.
STOPPED = (MeasureTimeout, UnsupportedDevice, WorkerDied, WorkerFailed)


@dataclass(frozen=True)
class How:
    """How to search, as the options say it."""

    budget: float
    resume: bool
    seed: int
    dry_run: bool
    predict: bool
    storage: str | None
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
    epilog=example(
        "plantune search --batch 8", "plantune search --model resnet18 --batch 1 --budget 300"
    ),
)
@common_options()
@workload_options
@budget_option(90.0, "Seconds for the whole search.")
@click.option(
    "--resume/--fresh",
    "resume",
    default=True,
    help="Use what earlier searches measured here, or measure everything again.",
)
@seed_option("Of every random draw.")
@click.option("--dry-run", is_flag=True, help="Show what would be tried, and how long at most.")
@click.option("--predict", is_flag=True, help="Plan for a GPU that is not here, without measuring.")
@click.option(
    "--storage",
    metavar="URL",
    help="Optuna storage of the trials, instead of a file beside the plan database.",
)
@click.option(
    "--wait/--no-wait", default=True, help="Wait for another search of the same plan, or exit 75."
)
@click.option(
    "--shipped/--no-shipped",
    default=True,
    help="Begin from plans that plantune ships and from those of other machines too.",
)
@bundled(How, "how")
def search_command(console: Console, place: Path | None, workload: Workload, how: How) -> None:
    """Finds the fastest plan on this machine, proves it and keeps it.

    Ctrl-C keeps the best plan so far (exit 7); the next search goes on from there.
    """
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
        raise click.UsageError("--predict is for the arch of a GPU; give --arch sm80, for example")
    if how.predict:
        return
    try:
        require_device(workload.arch, "measure")
    except NoUsableDevice as error:
        raise NoUsableDevice(f"{error}; --predict plans for {workload.arch} unmeasured") from error


def _search(console: Console, place: Path | None, workload: Workload, how: How) -> None:
    from plantune.cli.keeping import KeepingDatabase
    from plantune.cli.search_report import is_lost, show_result
    from plantune.plan_db.proofs import remember_proof

    start = time.monotonic()
    with interrupts() as stop, database(place, read_only=False) as opened:
        keeping = KeepingDatabase(opened, lambda text: note(f"warning: {text}"))
        environment = environment_here(workload.arch)
        note(f"{workload}; {machine_text(environment.to_json())}; {how.budget:g} s")
        if (hint := no_compiler_line(workload.arch)) is not None:
            note(hint)
        with _lease(opened, workload, how) as lease:
            result = _run(keeping, environment, workload, how, _Watch(stop, lease))
    if result.race is not None:  # which compared its outputs with the framework's
        remember_proof(result.plan, environment)
    show_result(console, workload, result, keeping, environment, time.monotonic() - start)
    if is_lost(result, keeping):
        raise click.exceptions.Exit(FAILED)
    if not result.complete:
        raise click.exceptions.Exit(INTERRUPTED)


class _Watch:
    """What happens at each progress event: the line, the lease's heartbeat, a late interrupt."""

    def __init__(self, stop: Interrupts, lease: Lease | None) -> None:
        self.line = ProgressLine(sys.stderr)
        self._stop = stop
        self._lease = lease
        self._beaten = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        self._stop.check()
        self.line(progress)
        if self._lease is not None and time.monotonic() - self._beaten > BEAT_S:
            self._beaten = time.monotonic()
            try:
                self._lease.beat()
            except DatabaseUnavailable:
                self._lease = None  # the search goes on in memory; others may search


@contextmanager
def _lease(opened: PlanDatabase, workload: Workload, how: How) -> Iterator[Lease | None]:
    """One search for a workload at a time; raises Busy. None if the database cannot be written."""
    name = str(workload)
    try:
        try:
            lease = opened.acquire_lease(name)
        except Busy as busy:
            if not how.wait:
                raise
            note(f"waiting up to {how.wait_s:.0f} s: {busy}")
            lease = opened.wait_for_lease(name, how.wait_s)
    except DatabaseUnavailable:
        yield None
        return
    with lease:
        yield lease


def _run(
    keeping: KeepingDatabase, environment: Environment, workload: Workload, how: How, watch: _Watch
) -> Result:
    """The search's result, or what it has when it is interrupted."""
    from plantune.cli.quiet import wait_for_quiet
    from plantune.measure.machine_state import Machine, gpu_watcher
    from plantune.search.search import Search

    settings = _settings(keeping, how)
    search = Search(workload.graph, workload.problem, settings, keeping, environment, watch)
    wait_for_quiet(how.budget, Machine(gpu=gpu_watcher(workload.arch)))  # in the search's budget
    worker = worker_for(workload)  # raises if there is no room for it
    try:
        with worker:
            return search.run(worker)
    except KeyboardInterrupt:
        watch.line.end()
        with undisturbed():
            return _partial(search)
    except STOPPED:
        with undisturbed():
            if search.partial() is not None:
                note("warning: the search ended early; the best plan so far is kept as partial")
        raise
    finally:
        watch.line.end()


def _partial(search: Search) -> Result:
    result = search.partial()
    if result is None:
        raise click.ClickException("interrupted before anything was measured; nothing was saved")
    return result


def _settings(keeping: KeepingDatabase, how: How) -> Settings:
    from plantune.cli.storage import storage_for
    from plantune.search.results import Settings

    storage = storage_for(how.storage, keeping.path, how.seed)
    return Settings(how.budget, how.seed, how.fresh, storage, shipped=how.shipped)
