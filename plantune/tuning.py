"""`tune`: searches for the plan of a module from Python, and gives the module that runs from it."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

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
    WorkerDied,
)
from plantune.graph.tape import tape_of
from plantune.machine import arch_of, environment_of
from plantune.plan import Plan
from plantune.plan_db.database import PlanDatabase
from plantune.problem import Problem
from plantune.report.progress import ProgressLine
from plantune.runtime.load import TrainingMode, optimize
from plantune.runtime.module import TunedModule
from plantune.search.first_interrupt import FirstInterrupt, first_interrupt
from plantune.search.keeping import KeepingDatabase
from plantune.search.results import Report, Result, Settings, silent
from plantune.search.session import KEPT_EARLY, Manner, Sought, search_plan

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

    A line shows the progress on a terminal and in notebooks; with `progress` True wherever stderr
    goes, with False nowhere. Kernels are measured in another process, on random weights; nothing of
    the module itself is run or changed.

    Ctrl-C ends the search, at any time: the module runs from the plan that got through its race by
    then, from one of an earlier search, or as without a plan, and `optimize` later does the same. A
    second one raises KeyboardInterrupt. Where no plan can be proved and raced, eager runs, and
    NoPlanLeft warns of it with the reason.

    Raises UnsupportedModule as `optimize` does, and UnsupportedDevice if plantune has no plans for
    the device, or it is lost.
    """
    for name in {"plan", "pad_to"} & example_kwargs.keys():
        raise TypeError(f"tune takes no {name}: give it to optimize")
    how: dict[str, Any] = {"mode": mode, "frozen": frozen, "fallback": fallback}
    with first_interrupt() as stop:
        tuned = optimize(module, *example_inputs, **how, **example_kwargs)
        if stop.requested:
            return tuned
        found = _found(tuned, budget, progress, stop)
        given = None if found is None else found.given
        if found is not None and found.result.unraced and found.result.nothing_left is None:
            text = (
                f"{found.result.unraced}; a second tune goes on from here, or give a longer budget"
            )
            warnings.warn(text, stacklevel=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainingMode)  # said before the search
            return optimize(module, *example_inputs, plan=given, **how, **example_kwargs)


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
        warnings.warn(text, NoPlanLeft, stacklevel=3)
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
    baselines: tuple[str, ...] | None = None,
    saving: Callable[[], AbstractContextManager[None]] | None = None,
) -> Searched:
    """Searches for so many seconds, on a device of the problem's arch, and stores the plan in the
    user's database. An interrupted search gives its best so far, not stored. Without `baselines`
    the plan races against all of the framework's ways for which there is time. `saving` is entered
    to save an interrupted search; else Ctrl-C is ignored meanwhile.

    Warns of NoPlanLeft if the framework's plan is all that is left.
    """
    if not (isinstance(budget_s, (int, float)) and budget_s > 0):
        raise ValueError(f"budget must be a number of seconds above 0, got {budget_s!r}")
    manner = Manner(report, _warn, 2 * budget_s + SLACK_S, saving or _undisturbed)
    with closing(_database()) as opened:
        keeping = KeepingDatabase(opened, _warn)
        settings = Settings(budget_s, seed, baselines=baselines)
        result = search_plan(sought, settings, keeping, environment_of(device), manner)
    if result.nothing_left is not None:
        warnings.warn(f"{sought.problem.network}: {result.unraced}", NoPlanLeft, _users_level())
    stored = keeping.plan_id is not None or result.known is not None
    return Searched(result, stored and result.is_raced)


def _users_level() -> int:
    """Of a warning, so that it names the line that asked for the search."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("plantune."):
        level, frame = level + 1, frame.f_back
    return level


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
    if text == KEPT_EARLY:  # the error says more
        return
    warnings.warn(text, DatabaseWarning, stacklevel=2)


@contextmanager
def reporting(progress: bool | None) -> Iterator[Report]:
    """A line on stderr where somebody sees it, or where it is asked for."""
    stream = sys.stderr
    rewrites = _is_terminal(stream) or _in_notebook()
    # A process without a terminal may have no stderr at all.
    if stream is None or progress is False or (progress is None and not rewrites):
        yield silent
        return
    with ProgressLine(stream, rewrites=rewrites) as line:
        yield line


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
