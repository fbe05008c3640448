"""`tune`: searches for the plan of a module from Python, and gives the module that runs from it."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import nn

from plantune.base.given import is_number, require_flag, require_value
from plantune.base.warning import warn
from plantune.devices.cuda.flags import planned_for
from plantune.devices.machine import arch_of, environment_of
from plantune.errors import (
    Busy,
    DamagedDatabase,
    DatabaseUnavailable,
    DatabaseWarning,
    InvalidDatabase,
    MeasureTimeout,
    NewerSchema,
    NoPlanLeft,
    NotEnoughMemory,
    PlantuneError,
    WorkerDied,
)
from plantune.graph.tracing.tape import tape_of
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.plan import Plan
from plantune.plans.problem import Problem
from plantune.report.progress import ProgressLine
from plantune.runtime.load import TrainingMode, optimize
from plantune.runtime.module import TunedModule
from plantune.runtime.summary import headline_of, runs_of
from plantune.search.first_interrupt import FirstInterrupt, first_interrupt
from plantune.search.keeping import KeepingDatabase
from plantune.search.results import Report, Result, SearchOptions, silent
from plantune.search.session import KEPT_EARLY, Manner, search_plan
from plantune.search.sought import Sought

# What keeps a search from a machine that is busy, too small or broken. The module runs there.
NO_SEARCH = (Busy, MeasureTimeout, NotEnoughMemory, WorkerDied)
# Another search of the same plan may have its whole budget, and some time for what it overruns.
SLACK_S = 120.0


def tune(
    module: nn.Module,
    *example_inputs: Any,
    budget: float = 60.0,
    mode: str = "infer",
    frozen: bool = False,
    fallback: str = "warn",
    progress: bool | None = None,
    **example_kwargs: Any,
) -> TunedModule:
    """As `optimize`, after a search for the plan that takes `budget` seconds. What it measured and
    found is kept: `optimize`, the backend of torch.compile and the next `tune` begin from it.

    A line shows the progress on a terminal and in notebooks, and at the end one says what runs the
    network and how fast; with `progress` True wherever stderr goes, with False nowhere. Kernels are
    measured in another process, on random weights; nothing of the module itself is run or changed.

    Ctrl-C ends the search, at any time: the module runs from the plan that got through its race by
    then, from one of an earlier search, or as without a plan, and `optimize` later does the same. A
    second one raises KeyboardInterrupt. Where no plan can be proved and raced, eager runs, and
    NoPlanLeft warns of it with the reason.

    Raises UnsupportedModule as `optimize` does, and UnsupportedDevice if plantune has no plans for
    the device, or it is lost.
    """
    for name in {"plan", "pad_to"} & example_kwargs.keys():
        raise TypeError(f"tune takes no {name}: give it to optimize")
    _require_budget(budget)
    if progress is not None:
        require_flag("progress", progress)
    how: dict[str, Any] = {"mode": mode, "frozen": frozen, "fallback": fallback}
    with first_interrupt() as stop:
        tuned = optimize(module, *example_inputs, **how, **example_kwargs)
        if stop.requested:
            return tuned
        found = _found(tuned, budget, progress, stop)
        given = None if found is None else found.given
        if found is not None and found.result.unraced and found.result.nothing_left is None:
            warn(f"{found.result.unraced}; a second tune goes on, or give a longer budget")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainingMode)  # said before the search
            tuned = optimize(module, *example_inputs, plan=given, **how, **example_kwargs)
    _say_how_it_runs(tuned, progress)
    return tuned


def _say_how_it_runs(tuned: TunedModule, progress: bool | None) -> None:
    """In one sentence, where the progress was shown."""
    stream = _stream_for(progress)
    if stream is None:
        return
    with suppress(PlantuneError, OSError, ValueError):  # the next call says why it cannot run
        planned = tuned._calls.expected()
        stream.write(headline_of(planned.pool.plan, runs_of(planned)) + "\n")


def _found(
    tuned: TunedModule, budget_s: float, progress: bool | None, stop: FirstInterrupt
) -> Searched | None:
    """What a search found, None if it was interrupted before it found anything, or cannot be."""
    try:
        with stop.ending(), reporting(progress) as report:
            sought, device = sought_for(tuned)
            return search_for(
                sought, device, budget_s, report=stop.reported(report), saving=stop.saving
            )
    except KeyboardInterrupt:
        if stop.again:
            raise
    except NO_SEARCH as error:
        text = f"no search for {type(tuned.reference).__name__}: {error}"
        text += "; it runs as `optimize` has it, and what was measured is kept"
        warn(text, NoPlanLeft)
    return None


@dataclass(frozen=True)
class Searched:
    """What a search found; `stored` says that whoever looks for the plan finds it."""

    result: Result
    stored: bool

    @property
    def plan(self) -> Plan:
        return self.result.plan

    @property
    def given(self) -> Plan | None:
        """The plan that a module must be given: what is stored serves other calls, too. One that
        was interrupted before its race is for the next search alone, and none of no steps is given.
        """
        is_needed = self.result.is_raced and not self.stored and self.plan.choices
        return self.plan if is_needed else None


def sought_for(tuned: TunedModule) -> tuple[Sought, torch.device]:
    """What a search needs of the call that a tuned module was made for."""
    calls = tuned._calls
    graph, device = calls.expected_graph(), calls.device
    problem = Problem.of(graph, arch_of(device), calls.options.name)
    tape = tape_of(tuned.reference, calls.arguments, derives=problem.mode == "train")
    return Sought(graph, problem, tape), device


def search_for(
    sought: Sought,
    device: torch.device,
    budget_s: float,
    *,
    seed: int = 0,
    report: Report = silent,
    routes: tuple[str, ...] | None = None,
    saving: Callable[[], AbstractContextManager[None]] | None = None,
) -> Searched:
    """Searches for so many seconds, on a device of the problem's arch, and stores the plan in the
    user's database. An interrupted search gives its best so far, not stored. Without `routes` the
    plan races against all of the framework's routes for which there is time. `saving` is entered to
    save an interrupted search; else Ctrl-C is ignored meanwhile.

    Warns of NoPlanLeft if the framework's plan is all that is left.
    """
    _require_budget(budget_s)
    manner = Manner(report, _warn, 2 * budget_s + SLACK_S, saving or _undisturbed)
    # Another thread may set torch otherwise meanwhile: then trials would have the wrong key.
    holds = planned_for(sought.problem.precisions or None)
    with closing(_database()) as opened, holds:
        keeping = KeepingDatabase(opened, _warn)
        options = SearchOptions(budget_s, seed, routes=routes)
        result = search_plan(sought, options, keeping, environment_of(device), manner)
    if result.nothing_left is not None:
        warn(f"{sought.problem.network}: {result.unraced}", NoPlanLeft)
    stored = keeping.plan_id is not None or result.known is not None
    return Searched(result, stored and result.is_raced)


def _require_budget(seconds: object) -> None:
    fits = is_number(seconds) and 0 < seconds < inf
    require_value("budget", seconds, "a number of seconds above 0", fits=fits)


def _database() -> PlanDatabase:
    """The user's; one that is damaged is set aside, and without one, or with one of a later
    plantune, the search goes on.
    """
    try:
        try:
            return PlanDatabase.open()
        except DamagedDatabase:
            return PlanDatabase.open()
    except (DatabaseUnavailable, InvalidDatabase, NewerSchema) as error:
        _warn(f"{error}; the plan is not stored")
        return PlanDatabase.in_memory()


def _warn(text: str) -> None:
    if text != KEPT_EARLY:  # else the error says more
        warn(text, DatabaseWarning)


@contextmanager
def reporting(progress: bool | None) -> Iterator[Report]:
    """A line on stderr where somebody sees it, or where it is asked for."""
    stream = _stream_for(progress)
    if stream is None:
        yield silent
        return
    with ProgressLine(stream, rewrites=_is_rewritten(stream)) as line:
        yield line


def _stream_for(progress: bool | None) -> Any:
    """Where to show progress; None if nowhere. A process without a terminal may have no stderr."""
    stream = sys.stderr
    shows = _is_rewritten(stream) if progress is None else progress
    return stream if shows else None


def _is_rewritten(stream: Any) -> bool:
    return _is_terminal(stream) or _in_notebook()


def _is_terminal(stream: Any) -> bool:
    """Also of None, of a closed stream, and of an object that can only be written to."""
    with suppress(AttributeError, ValueError):
        return bool(stream.isatty())
    return False


def _in_notebook() -> bool:
    """Whether stderr is shown by a notebook, which is not a terminal but takes carriage returns."""
    return type(sys.stderr).__module__.startswith("ipykernel.")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Another Ctrl-C does not end the saving of what there is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
