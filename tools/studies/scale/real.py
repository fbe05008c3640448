"""Runs a shared search for real, on a database: processes with slots that sleep as long as was
recorded. Claims, outcomes, heartbeats and news are those of `plantune search --storage`.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from replay import Job
from simulate import Costs

from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured, Outcome
from plantune.devices.machine import cpu_environment
from plantune.kernels.family import Candidate
from plantune.search.results import Patience
from plantune.search.shared.board import Board
from plantune.search.shared.board_rows import SharedSearch
from plantune.search.shared.joint import Heart
from plantune.search.shared.rdb import Persistent, close_shared, opened_shared
from plantune.search.worker_pool import WorkerPool

PATIENCE = Patience(10)
# Of a search: as many as it takes at once, at least so many, and the part of its share of the rest.
BATCH, PART = 4, 4


@dataclass(frozen=True)
class Ran:
    """What a run took, and how many outcomes the study has."""

    seconds: float
    efficiency: float
    outcomes: int


def _candidate(number: int) -> SimpleNamespace:
    step = SimpleNamespace(signature=f"{number % 60}", name="step")
    config = Candidate("recorded", Attrs(number=number))
    return SimpleNamespace(key=(step.signature, config), step=step, candidate=config)


def _slot(jobs: Sequence[Job]) -> SimpleNamespace:
    def measure(step: object, candidate: Candidate, limit_us: float) -> Outcome:
        job = jobs[candidate.config["number"]]
        time.sleep(job.busy_s)
        return Measured(job.us, job.us, job.us, 9, 0.0, 1.0, True)

    return SimpleNamespace(measure=measure)


def board_at(url: str, name: str) -> tuple[Board, object]:
    does = Persistent(url, PATIENCE.gone_s, print)
    storage = does(lambda: opened_shared(url, PATIENCE))
    board = Board(SharedSearch(storage, name, PATIENCE), cpu_environment(), does, print)
    board.join()
    return board, storage


def _host(url: str, name: str, jobs: Sequence[Job], slots: int) -> None:
    """One search, until nobody lacks anything: as the loop of a search takes candidates."""
    board, storage = board_at(url, name)
    heart = Heart(board, float(PATIENCE.heartbeat_s))
    heart.start()
    pool = WorkerPool([_slot(jobs) for _ in range(slots)], shared=board)
    left = {number: _candidate(number) for number in range(len(jobs))}

    def land(timeout_s: float | None = None) -> None:
        done = pool.finished(timeout_s)
        if done is not None:
            board.report(done.candidate, done.outcome)
            left.pop(done.candidate.candidate.config["number"], None)

    while left:
        for (_, config), _ in board.new_outcomes():
            left.pop(config.config["number"], None)
        free = [c for c in left.values() if not board.has(c) and not pool.has(c)]
        batch = board.spread(free)[: max(BATCH, 2 * slots, len(free) // (PART * board.searches))]
        for candidate in board.claim(*batch) if batch else ():
            while pool.is_full:
                land()
            pool.start(candidate, 1.0)
        if not free:
            land(0.05)
    heart.stop()
    board.leave()
    close_shared(storage)


def run(url: str, name: str, jobs: Sequence[Job], workers: int, slots: int) -> Ran:
    """Forks a process for each host; they begin when all are there."""
    sizes = [min(slots, workers - start) for start in range(0, workers, slots)]
    gate, go = os.pipe()
    children = []
    for size in sizes:
        pid = os.fork()
        if not pid:
            os.close(go)
            code = 1
            try:
                os.read(gate, 1)  # ends when the parent closes its end
                _host(url, name, jobs, size)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    os.close(gate)
    start = time.monotonic()
    os.close(go)
    codes = [os.waitpid(pid, 0)[1] for pid in children]
    seconds = time.monotonic() - start
    if any(codes):
        raise RuntimeError(f"searches ended with {codes}")
    board, storage = board_at(url, name)
    outcomes = len({key for key, _ in board.new_outcomes()})
    board.leave()
    close_shared(storage)
    busy_s = sum(job.busy_s for job in jobs)
    return Ran(seconds, busy_s / (workers * seconds), outcomes)


def costs_of(url: str, name: str, rows: int, server: int | None) -> Costs:
    """What each operation takes in a study of so many rows; the lock is held for what adding a row
    takes. With the process of a server on this machine these are CPU seconds of both, which other
    work disturbs little; else seconds of the clock.
    """
    warnings.simplefilter("ignore")
    board, storage = board_at(url, name)
    candidates = [_candidate(number) for number in range(rows)]
    outcome = Measured(1.0, 1.0, 1.0, 9, 0.0, 1.0, True)

    def each(work: Callable[[int], object], count: int = rows) -> float:
        start = _spent_s(server)
        for number in range(count):
            work(number)
        return (_spent_s(server) - start) / count

    batches = rows // BATCH
    claim_s = each(lambda n: board.claim(*candidates[BATCH * n : BATCH * (n + 1)]), batches)
    tell_s = each(lambda n: board.report(candidates[n], outcome), BATCH * batches)
    news_s = each(lambda n: board.new_outcomes())
    added: list[int] = []
    add_s = each(lambda n: added.append(board._add("cost", {}, board._number)))
    for id in added:
        board._end(id)
    board.leave()
    close_shared(storage)
    return Costs(add_s, max(claim_s - add_s, 0.0), tell_s, news_s, BATCH)


def _spent_s(server: int | None) -> float:
    if server is None:
        return time.perf_counter()
    ticks = 0
    for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")
