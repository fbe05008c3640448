"""Finds the fastest way for a module without a plan, or with one of another machine, in its own
first calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from plantune.plan import EAGER, FROZEN_RUNNERS, LIVE_RUNNERS, PROGRAM
from plantune.runtime.live_state import HeldTensors
from plantune.runtime.runners import RECIPES, Runner, StridesOf

# A module that is called less often stays with eager, and its first calls cost nothing more.
EAGER_CALLS = 3
# Of each way: in the first it is made, in the second TorchScript optimizes what it saw.
UNTIMED, TIMED = 2, 6
# Looking at the module before each call, which only eager can do without, takes half of this.
SHORTEST_S = 100e-6
WORTH = 0.95
HOPELESS = 1.5


class PlansProgram:
    """A plan that was measured on another machine, as one of the ways."""

    name = PROGRAM
    why_not = None

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


Contestant = Runner | PlansProgram


class Contest:
    """Runs each call in one of the ways, all of which give the same, and times it; then in the one
    that is clearly faster, else in eager. `program` is what the plan of another machine gives.
    """

    def __init__(
        self,
        held: HeldTensors,
        *,
        frozen: bool = False,
        program: Callable[..., Any] | None = None,
        strides: StridesOf = lambda args, kwargs: None,
    ) -> None:
        known = FROZEN_RUNNERS if frozen else LIVE_RUNNERS
        names = (name for name in known if name not in (PROGRAM, EAGER))
        filters = any(p.dim() == 4 for p in held.module.parameters())
        self._left: list[Contestant] = [
            Runner(name, held, strides=strides)
            for name in names
            if filters or not RECIPES[name].channels_last
        ]
        if program is not None:
            self._left.insert(0, PlansProgram(program))
        self._eager = Runner(EAGER, held)
        self._times: dict[str, list[float]] = {}
        self._lock = threading.Lock()
        self._calls = 0
        self.winner: Contestant | None = None

    @property
    def name(self) -> str:
        """Of the way that runs calls from now on, or of the one to beat."""
        return self._eager.name if self.winner is None else self.winner.name

    @property
    def is_settled(self) -> bool:
        return self.winner is not None

    def run(self, began_s: float, *args: Any, **kwargs: Any) -> object:
        """The module's result; `began_s` is when the call did, by the clock of performance."""
        runner = self.winner or self._next()
        began_s = time.perf_counter() if runner is self._eager else began_s
        result = runner(*args, **kwargs)
        if self.winner is None:
            self._note(runner, time.perf_counter() - began_s)
        return result

    def _next(self) -> Contestant:
        if torch.are_deterministic_algorithms_enabled():
            return self._eager
        with self._lock:
            self._calls += 1
            if self._calls <= EAGER_CALLS:
                return self._eager
            turns: list[Contestant] = [self._eager, *self._left]
            return turns[self._calls % len(turns)]

    def _note(self, runner: Contestant, seconds: float) -> None:
        with self._lock:
            times = self._times.setdefault(runner.name, [])
            times.append(seconds)
            if len(self._times[runner.name]) < (EAGER_CALLS if runner is self._eager else UNTIMED):
                return
            self._drop_losers()
            if all(len(self._timed(r)) >= TIMED for r in self._left):
                self._decide()

    def _timed(self, runner: Contestant) -> list[float]:
        return self._times.get(runner.name, [])[UNTIMED:]

    def _drop_losers(self) -> None:
        """Ways that cannot run here, and those that are slower by far."""
        eager_s = min(self._times.get(EAGER, [0.0]))
        if eager_s < SHORTEST_S:
            self._left = []
        self._left = [
            r
            for r in self._left
            if r.why_not is None and min(self._timed(r), default=0.0) <= HOPELESS * eager_s
        ]

    def _decide(self) -> None:
        eager = self._timed(self._eager)
        ranked = sorted(self._left, key=lambda r: median(self._timed(r)))
        best = ranked[0] if ranked else self._eager
        times = self._timed(best)
        sure = bool(eager) and all(WORTH * by(eager) >= by(times) for by in (min, median))
        self.winner = best if sure else self._eager
        self._left = []
