"""`tune`: searches for the plan of a module from Python, and gives the module that runs from it."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import nn

from plantune.errors import (
    DamagedDatabase,
    DatabaseUnavailable,
    DatabaseWarning,
    PlantuneError,
)
from plantune.given import is_number, require_flag, require_value
from plantune.graph.tape import tape_of
from plantune.machine import arch_of, environment_of
from plantune.plan import Plan
from plantune.plan_db.database import PlanDatabase
from plantune.plan_db.stored import find_stored_plan
from plantune.problem import Problem
from plantune.report.progress import ProgressLine
from plantune.runtime.load import TrainingMode, optimize
from plantune.runtime.module import TunedModule
from plantune.runtime.summary import headline_of, runs_of
from plantune.search.keeping import KeepingDatabase
from plantune.search.results import Report, Result, Settings, silent
from plantune.search.session import Manner, Sought, search_plan
from plantune.warning import warn

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
    network and how fast; with `progress` True wherever stderr goes, with False nowhere. Ctrl-C ends
    the search with the best plan so far, or with one that is stored from an earlier search, which
    was raced. Kernels are measured in another process, on random weights; nothing of the module
    itself is run or changed.

    Raises UnsupportedModule as `optimize` does, UnsupportedDevice if plantune has no plans for the
    device, and KeyboardInterrupt if nothing was measured yet.
    """
    for name in {"plan", "pad_to"} & example_kwargs.keys():
        raise TypeError(f"tune takes no {name}: give it to optimize")
    _require_budget(budget)
    if progress is not None:
        require_flag("progress", progress)
    how: dict[str, Any] = {"mode": mode, "frozen": frozen, "fallback": fallback}
    tuned = optimize(module, *example_inputs, **how, **example_kwargs)
    sought, device = sought_for(tuned)
    with reporting(progress) as report:
        found = search_for(sought, device, budget, report=report)
    # What is stored serves other calls, too; a plan that is given is for this one alone. That of an
    # interrupted search was never raced.
    raced = found.result.complete
    stored = found.stored if raced else _is_stored(sought, device)
    plan = None if stored else found.result.plan
    if found.result.unraced:
        text = f"{found.result.unraced}; a second tune goes on from here, or give a longer budget"
        warn(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingMode)  # said before the search
        tuned = optimize(module, *example_inputs, plan=plan, **how, **example_kwargs)
    _say_how_it_runs(tuned, progress)
    return tuned


def _say_how_it_runs(tuned: TunedModule, progress: bool | None) -> None:
    """In one sentence, where the progress was shown."""
    stream = _stream_for(progress)
    if stream is None:
        return
    with suppress(PlantuneError, OSError, ValueError):  # the next call says why it cannot run
        planned = tuned._calls.expected()
        stream.write(headline_of(planned.stock.plan, runs_of(planned)) + "\n")


def _is_stored(sought: Sought, device: torch.device) -> bool:
    """Whether there is a plan of an earlier search here."""
    found = find_stored_plan(sought.problem, environment_of(device))
    return found is not None and found.match == "exact"


@dataclass(frozen=True)
class Searched:
    """What a search found; `stored` says that whoever looks for the plan finds it."""

    result: Result
    stored: bool

    @property
    def plan(self) -> Plan:
        return self.result.plan


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
) -> Searched:
    """Searches for so many seconds, on a device of the problem's arch, and stores the plan in the
    user's database. An interrupted search gives its best so far, not stored. Without `baselines`
    the plan races against all of the framework's ways for which there is time.
    """
    _require_budget(budget_s)
    manner = Manner(report, _warn, 2 * budget_s + SLACK_S, _undisturbed)
    with closing(_database()) as opened:
        keeping = KeepingDatabase(opened, _warn)
        settings = Settings(budget_s, seed, baselines=baselines)
        result = search_plan(sought, settings, keeping, environment_of(device), manner)
    stored = keeping.plan_id is not None or result.known is not None
    return Searched(result, stored and result.complete)


def _require_budget(seconds: object) -> None:
    fits = is_number(seconds) and 0 < seconds < inf
    require_value("budget", seconds, "a number of seconds above 0", fits=fits)


def _database() -> PlanDatabase:
    """The user's; one that is damaged is set aside, and without one the search goes on."""
    try:
        try:
            return PlanDatabase.open()
        except DamagedDatabase:
            return PlanDatabase.open()
    except DatabaseUnavailable as error:
        _warn(f"{error}; the plan is not stored")
        return PlanDatabase.in_memory()


def _warn(text: str) -> None:
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
