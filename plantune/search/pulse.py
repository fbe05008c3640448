"""Slow phases of the machine while candidates are measured: waited for a little, then corrected."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from plantune.measure.machine_state import SLOW, Machine, State
from plantune.measure.outcome import Measured, Outcome
from plantune.search.budget import Budget

# How old what is known of the machine's speed may be, and how to wait for a better one.
FRESH_S = 2.0
WAIT_S, PART_FOR_WAITING = 0.2, 0.05
REASON_LENGTH = 300


@dataclass
class Taken:
    """A measurement; `slowdown` is that of the machine before and after it, whichever is less."""

    slowdown: float = 1.0

    def corrected(self, outcome: Outcome) -> Outcome:
        """What it would have been at the machine's best, if it was in a slow phase throughout."""
        if not isinstance(outcome, Measured) or self.slowdown < SLOW:
            return outcome
        return replace(
            outcome,
            median_us=outcome.median_us / self.slowdown,
            low_us=outcome.low_us / self.slowdown,
            high_us=outcome.high_us / self.slowdown,
        )


class Pulse:
    """Feels the machine between candidates; of the budget, a small part goes to waiting."""

    def __init__(
        self,
        machine: Machine,
        budget: Budget,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._machine = machine
        self._clock = clock
        self._sleep = sleep
        self._waits = round(PART_FOR_WAITING * budget.seconds / WAIT_S)
        self._felt = -float("inf")
        self._slowdown = 1.0

    @contextmanager
    def taken(self) -> Iterator[Taken]:
        """For one measurement inside."""
        taken = Taken()
        before = self._settled()
        yield taken
        if before >= SLOW:
            taken.slowdown = min(before, self._feel())

    def _settled(self) -> float:
        if self._clock() - self._felt >= FRESH_S:
            self._feel()
        while self._slowdown >= SLOW and self._waits > 0:
            self._waits -= 1
            self._sleep(WAIT_S)
            self._feel()
        return self._slowdown

    def _feel(self) -> float:
        self._felt, self._slowdown = self._clock(), self._machine.slowdown()
        return self._slowdown


def marks(looks: Mapping[str, State]) -> dict[str, str]:
    """What a plan's evidence says of the machine during its search and its race."""
    worst = max(looks.values(), key=lambda state: (bool(state.reason), state.others))
    if not worst.reason:
        return {"machine": worst.word}
    said = "".join(letter for letter in worst.reason if letter.isprintable())
    return {"machine": worst.word, "disturbed_by": said[:REASON_LENGTH]}


def noted(looks: Mapping[str, State]) -> list[str]:
    """A line that warns where anything disturbed: in which phases, and what."""
    disturbed = [name for name, state in looks.items() if state.reason]
    if not disturbed:
        return []
    worst = max((looks[name] for name in disturbed), key=lambda state: state.others)
    during = " and ".join(disturbed)
    return [f"the machine was not quiet during {during}: {worst.reason}; times are less sure"]
