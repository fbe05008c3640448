"""Runs a shared search for real, on a database: processes with seats that sleep as long as was
recorded. Claims, outcomes, heartbeats and news are those of `plantune search --storage`.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from replay import Job
from simulate import Costs

from plantune.canonical import Attrs
from plantune.kernels.family import Candidate
from plantune.machine import cpu_environment
from plantune.outcome import Measured, Outcome
from plantune.search.board import Board, Place
from plantune.search.crew import Crew
from plantune.search.joint import Heart
from plantune.search.rdb import Persistent, close_shared, opened_shared
from plantune.search.results import Patience

PATIENCE = Patience(10)
BATCH = 4


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


def _seat(jobs: Sequence[Job]) -> SimpleNamespace:
    def measure(step: object, candidate: Candidate, limit_us: float) -> Outcome:
        job = jobs[candidate.config["number"]]
        time.sleep(job.busy_s)
        return Measured(job.us, job.us, job.us, 9, 0.0, 1.0, True)

    return SimpleNamespace(measure=measure)


def board_at(url: str, name: str) -> tuple[Board, object]:
    does = Persistent(url, PATIENCE.gone_s, print)
    storage = does(lambda: opened_shared(url, PATIENCE))
    board = Board(Place(storage, name, PATIENCE), cpu_environment(), does, print)
    board.join()
    return board, storage


def _host(url: str, name: str, jobs: Sequence[Job], seats: int) -> None:
    """One search, until nobody lacks anything: as the loop of a search takes candidates."""
    board, storage = board_at(url, name)
    heart = Heart(board, float(PATIENCE.heartbeat_s))
    heart.start()
    crew = Crew([_seat(jobs) for _ in range(seats)], shared=board)
    left = {number: _candidate(number) for number in range(len(jobs))}

    def land(timeout_s: float | None = None) -> None:
        done = crew.finished(timeout_s)
        if done is not None:
            board.tell(done.candidate, done.outcome)
            left.pop(done.candidate.candidate.config["number"], None)

    while left:
        for (_, config), _ in board.news():
            left.pop(config.config["number"], None)
        free = [c for c in left.values() if not board.has(c) and not crew.has(c)]
        for candidate in board.spread(free)[: max(BATCH, 2 * seats)]:
            while crew.is_full:
                land()
            if board.claim(candidate):
                crew.begin(candidate, 1.0)
        if not free:
            land(0.05)
    heart.stop()
    board.leave()
    close_shared(storage)


def run(url: str, name: str, jobs: Sequence[Job], workers: int, seats: int) -> Ran:
    """Forks a process for each host; they begin when all are there."""
    sizes = [min(seats, workers - start) for start in range(0, workers, seats)]
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
    outcomes = len({key for key, _ in board.news()})
    board.leave()
    close_shared(storage)
    busy_s = sum(job.busy_s for job in jobs)
    return Ran(seconds, busy_s / (workers * seconds), outcomes)


def costs_of(url: str, name: str, rows: int) -> Costs:
    """What the database and its client take for each operation, in a study of so many rows; the
    lock is held for what adding a row takes.
    """
    warnings.simplefilter("ignore")
    board, storage = board_at(url, name)
    spent = dict.fromkeys(("add", "claim", "tell", "news"), 0.0)
    for number in range(rows):
        candidate = _candidate(number)
        start = time.perf_counter()
        board.claim(candidate)
        spent["claim"] += time.perf_counter() - start
        start = time.perf_counter()
        board.tell(candidate, Measured(1.0, 1.0, 1.0, 9, 0.0, 1.0, True))
        spent["tell"] += time.perf_counter() - start
        start = time.perf_counter()
        board.news()
        spent["news"] += time.perf_counter() - start
        start = time.perf_counter()
        id = board._add("cost", {}, board._number)
        spent["add"] += time.perf_counter() - start
        board._end(id)
    board.leave()
    close_shared(storage)
    each = {what: seconds / rows for what, seconds in spent.items()}
    rest_s = max(each["claim"] - each["add"], 0.0)
    return Costs(each["add"], rest_s, each["tell"], each["news"], BATCH)
