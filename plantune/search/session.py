"""A search from its beginning to its end, as the command line and Python run it: a lease, a worker,
and what is kept if it is interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plantune.devices.gpus import Slot
from plantune.devices.machine import Environment
from plantune.errors import (
    Busy,
    DatabaseUnavailable,
    MeasureTimeout,
    StorageLost,
    UnsupportedDevice,
    WorkerDied,
    WorkerFailed,
)
from plantune.graph.graph import Graph
from plantune.measure.room import require_room
from plantune.measure.worker import client
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.proofs import remember_proof
from plantune.plans.problem import Problem
from plantune.search.results import Progress, Report, Result, SearchOptions, silent
from plantune.search.search import Search
from plantune.search.shared.board import Board
from plantune.search.shared.joint import joined
from plantune.search.sought import Sought

if TYPE_CHECKING:
    from plantune.plans.database.leases import Lease

BEAT_S = 10.0
# Errors that end a search but do not spoil what it measured.
STOPPED = (MeasureTimeout, StorageLost, UnsupportedDevice, WorkerDied, WorkerFailed)
KEPT_EARLY = "the search ended early; the best plan so far is kept as partial"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Manner:
    """How a session reports and waits. `saving` is entered to save an interrupted search, and
    `before` is called when the budget starts.
    """

    report: Report = silent
    say: Say = lambda text: None
    wait_s: float = 0.0
    saving: Callable[[], AbstractContextManager[None]] = nullcontext
    before: Callable[[], None] = lambda: None


def key_of(problem: Problem) -> str:
    """What one search at a time is for, with the layers: networks may share a name, or differ in
    channels or image size alone.
    """
    return f"{problem} ({problem.graph[:12]})"


def search_plan(
    sought: Sought,
    options: SearchOptions,
    database: PlanDatabase,
    environment: Environment,
    manner: Manner = Manner(),
) -> Result:
    """Searches and keeps the plan; an interrupted search gives its best so far, as partial.

    Raises Busy if another search for the same goes on for longer than the manner waits,
    KeyboardInterrupt if nothing was measured yet, and NotEnoughMemory if there is no room.
    """
    if options.patience is not None and options.storage is not None:
        result = _shared(sought, options, database, environment, manner)
    else:
        with _leased(database, key_of(sought.problem), manner) as lease:
            beating = replace(manner, report=_beating(manner.report, lease))
            result = _searched(sought, options, database, environment, beating)
    if (
        result.race is not None or result.elsewhere
    ):  # which compared its outputs with the framework's
        remember_proof(result.plan, environment)
    return result


def worker_for(
    graph: Graph, problem: Problem, build_s: float | None = None, slot: Slot | None = None
) -> client.Worker:
    """A measuring worker on a slot, with so many seconds for each build. A GPU leaves cores for
    another worker that waits in reserve.

    Raises NotEnoughMemory if there is no room for the network.
    """
    usual = client.Limits()
    memory_bytes = max(usual.memory_bytes, 2 * require_room(graph, problem))
    limits = replace(usual, memory_bytes=memory_bytes, build_s=build_s or usual.build_s)
    reserve = None if problem.arch == "cpu" else problem.arch
    environment = {} if slot is None else slot.environment
    return client.Worker(limits=limits, environment=environment, reserve=reserve, at_once=False)


def _shared(
    sought: Sought,
    options: SearchOptions,
    database: PlanDatabase,
    environment: Environment,
    manner: Manner,
) -> Result:
    """A search in a study that others share: it needs no lease."""
    assert options.storage is not None
    assert options.patience is not None
    place = (options.storage, sought.problem, environment, options.patience)
    with joined(*place, manner.say, fresh=options.fresh) as (board, heart):

        def report(progress: Progress) -> None:
            manner.report(progress)
            heart.report(progress)

        sharing = replace(manner, report=report)
        return _searched(sought, options, database, environment, sharing, board)


def _searched(
    sought: Sought,
    options: SearchOptions,
    database: PlanDatabase,
    environment: Environment,
    manner: Manner,
    board: Board | None = None,
) -> Result:
    search = Search(sought, options, database, environment, manner.report, board)
    manner.before()
    try:
        return _run(search, sought, options)
    except KeyboardInterrupt:
        with manner.saving():
            result = search.partial()
        if result is None:
            raise
        return result
    except STOPPED:
        with manner.saving():
            if search.partial() is not None:
                manner.say(KEPT_EARLY)
        raise


def _run(search: Search, sought: Sought, options: SearchOptions) -> Result:
    """On each slot with a worker of its own."""
    with ExitStack() as stack:
        slots = options.slots or (None,)
        workers = [worker_for(sought.graph, sought.problem, slot=slot) for slot in slots]
        return search.run(*map(stack.enter_context, workers))


@contextmanager
def _leased(database: PlanDatabase, key: str, manner: Manner) -> Iterator[Lease | None]:
    """One search for a problem at a time. None if the database cannot be written."""
    try:
        try:
            lease = database.acquire_lease(key)
        except Busy as busy:
            if not manner.wait_s:
                raise
            manner.say(f"waiting up to {manner.wait_s:.0f} s: {busy}")
            lease = database.wait_for_lease(key, manner.wait_s)
    except DatabaseUnavailable:
        yield None
        return
    with lease:
        yield lease


def _beating(report: Report, lease: Lease | None) -> Report:
    """The report that also shows that the lease's holder lives."""
    kept, beaten = lease, time.monotonic()

    def reporting(progress: Progress) -> None:
        nonlocal kept, beaten
        report(progress)
        if kept is not None and time.monotonic() - beaten > BEAT_S:
            beaten = time.monotonic()
            try:
                kept.beat()
            except DatabaseUnavailable:
                kept = None  # the search goes on in memory; others may search

    return reporting
