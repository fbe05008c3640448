"""Networks on their way to a race: one is searched, rivals of the next ones are compiled meanwhile.

Lanes run beside each other, each takes one network at a time: searches, compilers, races. A race
has the GPU for itself, as has everything else that is timed there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import beside
import speed
from asked import Asked, Row
from children import Child, Limits, Measure
from rows import Rows

BEGAN = time.monotonic()
# What a race takes, with making the calls that run in it; a search that begins leaves time for it.
RACE_S, LONGEST_RACE_S = 20.0, 60.0
# Beside its budget: plans are looked up before and after a search.
AROUND_S = 30.0
# A search with less than this part of its budget is not begun.
LEAST_PART = 0.4
# A search begins so long before the budget of the one before it is over.
OVERLAP_S = 15.0
# After its time is up a compiler needs some time to notice.
NOTICE_S = 8.0
# The rivals of so many networks are compiled before others race a second time.
AHEAD = 3
POLL_S = 0.2


@dataclass(eq=False)
class Line:
    """What is known of one network, and the process that holds its rivals until they race."""

    name: str
    asked: Asked
    rows: Rows
    rivals: Child
    # The rivals' process answers one question at a time.
    free: threading.Lock = field(default_factory=threading.Lock)
    tried: set[str] = field(default_factory=set)
    compiled: list[str] = field(default_factory=list)
    raced: frozenset[str] | None = None
    searched: bool = False

    def ask(self, child: Child, measure: Measure, named: str, seconds: float, asked: Asked) -> Row:
        """The row of a measure, written as soon as it is known."""
        child.limits = replace(child.limits, seconds=max(seconds, 1.0))
        row = child.row(self.name, measure, asked)
        self.rows.add({"network": self.name, "mode": asked.mode, "measure": named, **row})
        told = {key: value for key, value in row.items() if value}
        print(f"{time.monotonic() - BEGAN:.0f} s: {self.name} {named}", told, flush=True)
        return row

    def has(self, named: str, verdict: str) -> bool:
        row = self.rows.by_key.get((self.name, self.asked.mode, named), {})
        return row.get("verdict") == verdict

    def with_rivals(self, routes: Sequence[str]) -> Asked:
        return replace(self.asked, race=replace(self.asked.race, rivals=tuple(routes)))


@dataclass(frozen=True)
class Routes:
    """Rivals of every network, those that are captured in its race, and `late` ones of some."""

    first: Sequence[str]
    captured: Sequence[str]
    late: Sequence[str]
    late_networks: Sequence[str]
    # So many networks' rivals are compiled beside each other.
    compilers: int = 1


class Lanes:
    """Takes all lines to their races before `until`, on the clock of time.monotonic. No compiler
    has more than `compile_s` for one rival.
    """

    def __init__(
        self, lines: Sequence[Line], routes: Routes, limits: Limits, until: float, compile_s: float
    ) -> None:
        self._lines, self._routes, self._limits = lines, routes, limits
        self._until, self._compile_s = until, compile_s
        self._races = ThreadPoolExecutor(1)
        self._searching = True
        # Lines whose rivals are being compiled.
        self._compiling, self._claims = set[Line](), threading.Lock()

    def run(self) -> None:
        for line in self._lines:
            self._races.submit(self._race, line)  # what was searched before may need no rival
        try:
            runs = [self._search, *[self._compile] * self._routes.compilers]
            with ThreadPoolExecutor(len(runs)) as lanes:
                for lane in [lanes.submit(run) for run in runs]:
                    lane.result()
            self._races.shutdown()
        finally:
            for line in self._lines:
                line.rivals.stop()

    @property
    def _left_s(self) -> float:
        return self._until - time.monotonic()

    def _search(self) -> None:
        """One after the other. The process of the next one starts meanwhile, and its search begins
        while this one's ends: it lists candidates and compiles before it needs the GPU.
        """
        waiting = [line for line in self._lines if not line.searched]
        searches = list[Future[None]]()
        try:
            with ThreadPoolExecutor(1) as starting, ThreadPoolExecutor(2) as pair:
                ahead = [starting.submit(self._started, line) for line in waiting[:1]]
                for place, line in enumerate(waiting):
                    child = ahead.pop().result()
                    following = waiting[place + 1 : place + 2]
                    ahead = [starting.submit(self._started, line) for line in following]
                    searches.append(pair.submit(self._search_one, line, child))
                    wait(searches, max(line.asked.budget_s - OVERLAP_S, 0.0))
            for search in searches:
                search.result()
        finally:
            self._searching = False

    def _started(self, line: Line) -> Child:
        child = Child(self._limits)
        child.row(line.name, speed.prepared, line.asked)
        return child

    def _search_one(self, line: Line, child: Child) -> None:
        try:
            budget_s = min(line.asked.budget_s, self._left_s - RACE_S - AROUND_S / 3)
            if budget_s < LEAST_PART * line.asked.budget_s:
                print(f"{line.name}: no time for its search", flush=True)
                return
            asked = replace(line.asked, budget_s=budget_s)
            seconds = min(1.2 * budget_s + AROUND_S, self._left_s)
            line.ask(child, speed.searched, "searched", seconds, asked)
        finally:
            child.stop()
        line.searched = True
        self._races.submit(self._race, line)

    def _compile(self) -> None:
        while self._left_s > RACE_S and (
            self._searching or self._late_follow or any(self._wanted())
        ):
            found = self._claimed()
            if found is None:
                time.sleep(POLL_S)
                continue
            try:
                self._compile_one(*found)
            finally:
                self._compiling.remove(found[0])

    def _claimed(self) -> tuple[Line, str] | None:
        with self._claims:
            free = ((line, route) for line, route in self._wanted() if line not in self._compiling)
            found = next(free, None)
            if found is not None:
                self._compiling.add(found[0])
            return found

    @property
    def _late_follow(self) -> bool:
        """Whether late rivals are wanted once a race that waits or runs has ended."""
        named = [line for line in self._lines if line.name in self._routes.late_networks]
        return any(line.searched and line.raced is None for line in named)

    def _wanted(self) -> Iterator[tuple[Line, str]]:
        """What may be compiled now, the most urgent first."""
        soon = [line for line in self._lines if not line.searched][:AHEAD]
        for line in self._lines:
            for route in self._routes.first:
                if route not in line.tried and (line in soon or line.searched):
                    yield line, route
        by_name = {line.name: line for line in self._lines if line.raced is not None}
        for line in filter(None, map(by_name.get, self._routes.late_networks)):
            yield from ((line, route) for route in self._routes.late if route not in line.tried)
        for line in self._lines:
            yield from ((line, route) for route in self._routes.first if route not in line.tried)

    def _compile_one(self, line: Line, route: str) -> None:
        seconds = min(self._compile_s, self._left_s - RACE_S)
        asked = replace(
            line.with_rivals([route]),
            compile_until=time.monotonic() + seconds,
            beside_search=self._searching,
        )
        with line.free:
            line.tried.add(route)
            measure, named = beside.compile_rivals, f"compiled {route}"
            row = line.ask(line.rivals, measure, named, seconds + NOTICE_S, asked)
            if row["verdict"] == "compiled" and route not in row["failures"]:
                line.compiled.append(route)
        self._races.submit(self._race, line)

    def _race(self, line: Line) -> None:
        """Once its plan is there, and again once it has another rival."""
        if not line.free.acquire(blocking=False):
            return  # a rival is being compiled, after which it comes here again
        try:
            ready = frozenset(line.compiled)
            early = not line.searched or not line.tried.issuperset(self._routes.first)
            if early or ready == line.raced or self._left_s < RACE_S / 4:
                return
            asked = line.with_rivals([*line.compiled, *self._routes.captured])
            seconds = min(LONGEST_RACE_S, self._left_s)
            # Its process may have been lost with what it compiled, which is in the cache.
            asked = replace(asked, compile_until=time.monotonic() + seconds - RACE_S)
            named = "tuned" if line.raced is None else "tuned late"
            row = line.ask(line.rivals, beside.race, named, seconds, asked)
            if named == "tuned" and row["verdict"] == "timed":
                line.ask(line.rivals, beside.errors, "errors", seconds, asked)
            line.raced = ready
        finally:
            line.free.release()
