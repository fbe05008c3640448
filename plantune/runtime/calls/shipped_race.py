"""Tries a plan that plantune ships for CPUs, in the calls of a module that has no other plan.

CPUs differ more than the GPUs of an arch do: what is shipped was measured on another one. Its
kernels are compiled in a thread while the framework answers, for 11 to 16 s if nothing is cached;
then one call proves it (0.4 to 0.7 s, se_resnet9_fixup of 1 to 32 images, one thread of a Xeon,
2026-11-28), and a race in turns with the framework's fastest route decides.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from plantune.errors import PlantuneError
from plantune.plans.plan import PROGRAM
from plantune.runtime.calls.route_race import WORTH, RouteRace
from plantune.runtime.captured.program_pool import ProgramPool
from plantune.runtime.captured.shipped import Shipped
from plantune.runtime.watched.torch_internals import asks_for_determinism

log = logging.getLogger(__name__)

# For so long calls race, all of them together, and each side in so many calls at least and at most.
RACE_S = 2.0
LEAST_TIMED, MOST_TIMED = 3, 50
# The plan's program takes its memory in the first of its calls.
UNTIMED = 2


class ShippedRace:
    """Runs each call by the framework's route that a race finds, until the shipped plan can race
    it; then by the faster one. `run_from` makes a function that runs calls from a pool.
    """

    def __init__(
        self,
        race: RouteRace,
        shipped: Shipped,
        run_from: Callable[[ProgramPool], Callable[..., Any]],
    ) -> None:
        self.race = race
        self.pool: ProgramPool | None = None
        self.has_won = False
        self.is_over = False
        self._shipped = shipped
        self._run_from = run_from
        self._builder: threading.Thread | None = None
        self._program: Callable[..., Any] | None = None
        self._lock = threading.Lock()
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._calls = 0

    @property
    def name(self) -> str:
        """The name of the route that runs calls from now on, or of the one to beat."""
        return PROGRAM if self.has_won else self.race.name

    # While it goes on there is none; then what it has found takes its place.
    winner = None

    @property
    def is_settled(self) -> bool:
        return self.is_over and self.race.is_settled

    def run(self, began_s: float, *args: Any, **kwargs: Any) -> object:
        """The module's result; `began_s` is when the call did, by the clock of performance."""
        if self.is_over or not self.race.is_settled or asks_for_determinism():
            return self.race.run(began_s, *args, **kwargs)
        program = self._ready()
        if program is None:
            return self.race.run(began_s, *args, **kwargs)
        with self._lock:
            self._calls += 1
            ours = self._calls % 2 == 1
        began_s = time.perf_counter()
        try:
            result = (program if ours else self._theirs)(*args, **kwargs)
        except (PlantuneError, torch.OutOfMemoryError) as error:
            self._give_up(str(error))
            return self.race.run(began_s, *args, **kwargs)
        self._note(ours, time.perf_counter() - began_s)
        return result

    def _theirs(self, *args: Any, **kwargs: Any) -> object:
        return self.race.run(time.perf_counter(), *args, **kwargs)

    def _ready(self) -> Callable[..., Any] | None:
        """The plan's program, None while it is built, and where another call proves it."""
        if self._program is not None or not self._lock.acquire(blocking=False):
            return self._program
        try:
            if self._builder is None:
                self._builder = threading.Thread(target=self._shipped.build, daemon=True)
                self._builder.start()
            elif not self._builder.is_alive() and not self.is_over:
                self._prove()
        finally:
            self._lock.release()
        return self._program

    def _prove(self) -> None:
        made = self._shipped.prove()
        if isinstance(made, str):
            self._give_up(made)
        else:
            self.pool, self._program = made, self._run_from(made)

    def _give_up(self, why: str) -> None:
        self.is_over = True
        self._shipped.report(why)

    def _note(self, ours: bool, seconds: float) -> None:
        with self._lock:
            self._times[ours].append(seconds)
            mine, theirs = self._times[True][UNTIMED:], self._times[False][UNTIMED:]
            fewest = min(len(mine), len(theirs))
            raced_s = sum(map(sum, self._times.values()))
            if fewest >= MOST_TIMED or (fewest >= LEAST_TIMED and raced_s >= RACE_S):
                self.has_won = all(WORTH * by(theirs) >= by(mine) for by in (min, median))
                self.is_over = True
                how = "runs from now on" if self.has_won else "is not clearly faster here"
                ours_ms, theirs_ms = 1e3 * median(mine), 1e3 * median(theirs)
                text = "the shipped plan %s: %.3g ms a call, %s %.3g"
                log.info(text, how, ours_ms, self.race.name, theirs_ms)
