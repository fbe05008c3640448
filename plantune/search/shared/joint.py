"""A search that shares its work: it joins the others, sends heartbeats, and leaves at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from plantune.devices.machine import Environment
from plantune.plans.database.opening import now_text
from plantune.plans.database.rows import COMPLETE, StoredPlan
from plantune.plans.database.validation import check_stored_plan
from plantune.plans.plan import Plan
from plantune.plans.problem import Problem
from plantune.search.results import Patience, Progress
from plantune.search.shared.board import Board
from plantune.search.shared.board_rows import SharedSearch
from plantune.search.shared.rdb import FAULTS, Persistent, close_shared, opened_shared
from plantune.space.search_space import load_search_space

POLL_S = 0.5
# How long to wait for a running heartbeat before its connections are closed.
STOPPING_S = 30.0
Say = Callable[[str], None]


class Heart:
    """Beats for a board in a thread of its own: Optuna's heartbeat runs in `optimize` alone."""

    def __init__(self, board: Board, every_s: float) -> None:
        self._board = board
        self._every_s = every_s
        self._state: dict[str, Any] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(STOPPING_S)

    def report(self, progress: Progress) -> None:
        """What this search does, for all who look at the shared search."""
        self._state = {
            "phase": progress.stage,
            "measured": progress.measured,
            "rejected": progress.rejected,
            "detail": progress.detail,
            "best_us": min(progress.best.us, 1e300),
            "at": now_text(),
        }

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            with suppress(*FAULTS):  # the search itself says so, and gives up at last
                self._board.beat(self._state)


def name_of(problem: Problem) -> str:
    """The name that all searches of one problem in one search space share."""
    space = load_search_space(problem.arch).digest[:8]
    words = (problem.network, problem.graph[:12], problem.arch, space, *problem.precisions)
    return " ".join(words)


@contextmanager
def joined(
    url: str,
    problem: Problem,
    environment: Environment,
    patience: Patience,
    say: Say,
    *,
    fresh: bool = False,
) -> Iterator[tuple[Board, Heart]]:
    """The board at a URL, with this search on it. Raises ForeignSearch and StorageLost."""
    does = Persistent(url, patience.gone_s, say)
    storage = does(lambda: opened_shared(url, patience))
    board = Board(SharedSearch(storage, name_of(problem), patience), environment, does, say)
    try:
        board.join(fresh=fresh)
        heart = Heart(board, float(patience.heartbeat_s))
        heart.start()
        try:
            yield board, heart
        finally:
            heart.stop()
            board.leave()
    finally:
        close_shared(storage)


def wait_for_turn(board: Board, observe: Callable[[], None]) -> tuple[str | None, float]:
    """Waits until the others have measured all, too: the plan that one of them found, None if it is
    for this search to rank and race; and the seconds that this took.
    """
    start = time.monotonic()
    board.wait_for_turn()
    while True:
        turn = board.turn()
        observe()
        if turn is not False:
            return (None if turn is True else turn), time.monotonic() - start
        time.sleep(POLL_S)


def plan_of_others(
    board: Board, observe: Callable[[], None], here: Environment
) -> tuple[Plan | None, float]:
    """The plan of the search that ranked and raced, and how long that was waited for; None if it is
    this search's turn. Raises InvalidPlan for one that cannot be believed.
    """
    text, seconds = wait_for_turn(board, observe)
    if text is None:
        return None, seconds
    plan = Plan.loads(text)
    check_stored_plan(StoredPlan(0, plan, here, COMPLETE, now_text()))
    return plan, seconds
