"""Finds the fastest route for a module without a plan, or with a plan of another machine: its first
calls take turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from plantune.plans.plan import EAGER, FROZEN_ROUTES, LIVE_ROUTES, PROGRAM
from plantune.runtime.calls.routes import ROUTE_FEATURES, FrameworkRoute, StridesOf
from plantune.runtime.watched.live_state import OwnedTensors

WORTH = 0.95
# Times kept of a route.
MOST_TIMES = 1000
HOPELESS = 1.5


@dataclass(frozen=True)
class Pace:
    """How calls of some length are tried. A route has `turns` of so many calls. Its first ones are
    `untimed`: in one it is made, in another TorchScript optimizes what it saw. A module that is
    called less often than `eager` times, or for less than `eager_s`, stays with eager, and its
    calls cost nothing more.
    """

    turns: int
    untimed: int
    timed: int
    eager: int
    eager_s: float


LONG = Pace(turns=1, untimed=2, timed=6, eager=3, eager_s=0.0)
# Below SHORTEST_S clocks and caches are a part of what is seen; and to trace a module of three
# layers takes 26 ms, a thousand of its calls (one core of a Xeon, 2026-11-28).
SHORTEST_S = 100e-6
SHORT = Pace(turns=8, untimed=10, timed=48, eager=16, eager_s=10e-3)


class PlanRoute:
    """A plan that was measured on another machine, as one of the routes."""

    name = PROGRAM
    why_not = None
    is_eager = False
    is_made = True

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


Route = FrameworkRoute | PlanRoute


class RouteRace:
    """Runs each call by one of the routes, all of which give the same, and times it; then in the
    one that is clearly faster, else in eager. `program` is what the plan of another machine gives.
    """

    def __init__(
        self,
        owned: OwnedTensors,
        *,
        frozen: bool = False,
        program: Callable[..., Any] | None = None,
        strides: StridesOf = lambda args, kwargs: None,
    ) -> None:
        known = FROZEN_ROUTES if frozen else LIVE_ROUTES
        names = (name for name in known if name not in (PROGRAM, EAGER))
        filters = any(p.dim() == 4 for p in owned.module.parameters())
        self._left: list[Route] = [
            FrameworkRoute(name, owned, strides=strides)
            for name in names
            if filters or not ROUTE_FEATURES[name].channels_last
        ]
        if program is not None:
            self._left.insert(0, PlanRoute(program))
        self.eager = FrameworkRoute(EAGER, owned)
        self._times: dict[str, list[float]] = {}
        self._lock = threading.Lock()
        self._pace, self._calls = LONG, 0
        self._has_begun, self._waited_s = False, 0.0
        self.winner: Route | None = None

    @property
    def name(self) -> str:
        """The name of the route that runs calls from now on, or of the one to beat."""
        return self.eager.name if self.winner is None else self.winner.name

    @property
    def is_settled(self) -> bool:
        return self.winner is not None

    def run(self, began_s: float, *args: Any, **kwargs: Any) -> object:
        """The module's result; `began_s` is when the call did, by the clock of performance."""
        route = self.winner or self.turn()
        began_s = time.perf_counter() if route is self.eager else began_s
        result = route(*args, **kwargs)
        if self.winner is None:
            self.note(route, time.perf_counter() - began_s)
        return result

    def turn(self) -> Route:
        """Whose turn it is."""
        if torch.are_deterministic_algorithms_enabled() or not self._has_begun:
            return self.eager
        routes: list[Route] = [self.eager, *self._left]
        return routes[self._calls // self._pace.turns % len(routes)]

    def note(self, route: Route, seconds: float) -> None:
        """A call took so long by that route, from its beginning on; of eager the module alone, as
        that is what would run without plantune.
        """
        with self._lock:
            times = self._times.setdefault(route.name, [])
            self._calls += 1
            if not self._has_begun:
                self._wait(times, seconds)
                return
            # What comes after another route finds nothing of its own in a cache.
            is_first = self._pace.turns > 1 and self._calls % self._pace.turns == 1
            if len(times) < self._pace.untimed or (not is_first and len(times) < MOST_TIMES):
                times.append(seconds)
            if len(times) < self._pace.untimed:
                return
            self._drop_losers()
            if all(len(self._timed(each)) >= self._pace.timed for each in self._left):
                self._decide()

    def _wait(self, eager: list[float], seconds: float) -> None:
        """Until eager has taken long enough."""
        self._waited_s += seconds
        eager.append(seconds)
        if self._calls == LONG.eager and min(eager) < SHORTEST_S:
            self._pace = SHORT
        if self._calls >= self._pace.eager and self._waited_s >= self._pace.eager_s:
            self._has_begun = True
            self._calls = 0 if self._pace is SHORT else self._calls
        del eager[: -self._pace.eager]

    def _timed(self, route: Route) -> list[float]:
        return self._times.get(route.name, [])[self._pace.untimed :]

    def _drop_losers(self) -> None:
        """Routes that cannot run here, and those that are slower by far."""
        eager_s = min(self._times.get(EAGER, [0.0]))
        self._left = [
            each
            for each in self._left
            if each.why_not is None and min(self._timed(each), default=0.0) <= HOPELESS * eager_s
        ]

    def _decide(self) -> None:
        eager = self._timed(self.eager)
        ranked = sorted(self._left, key=lambda each: median(self._timed(each)))
        best = ranked[0] if ranked else self.eager
        times = self._timed(best)
        sure = bool(eager) and all(WORTH * by(eager) >= by(times) for by in (min, median))
        self.winner = best if sure else self.eager
        self._left = []
