"""What else the machine does during a search: it waits for slow spells to end or corrects for them,
and the plan and the messages say what disturbed them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from plantune.base.outcome import Measured, Outcome
from plantune.devices.gpus import Slot
from plantune.measure.machine_state import SLOW, Machine, State, gpu_watcher, machine_for
from plantune.search.budget import Budget
from plantune.space.arch import Arch

# How old a reading of the machine's speed may be, and how long to wait for a better one.
FRESH_S = 2.0
WAIT_S, PART_FOR_WAITING = 0.2, 0.05
REASON_LENGTH = 300


@dataclass
class Slowdown:
    """How slow the machine was before and after a measurement, whichever is less."""

    factor: float = 1.0

    def corrected(self, outcome: Outcome) -> Outcome:
        """The outcome as of a machine at its best, if it was in a slow spell throughout."""
        if not isinstance(outcome, Measured) or self.factor < SLOW:
            return outcome
        return replace(
            outcome,
            median_us=outcome.median_us / self.factor,
            low_us=outcome.low_us / self.factor,
            high_us=outcome.high_us / self.factor,
        )


class SlowSpells:
    """Reads the machine's speed between candidates; a small part of the budget is for waiting."""

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
        self._read_at = -float("inf")
        self._slowdown = 1.0

    @contextmanager
    def watched(self) -> Iterator[Slowdown]:
        """For one measurement inside."""
        found = Slowdown()
        before = self._settled()
        yield found
        if before >= SLOW:
            found.factor = min(before, self._read())

    def _settled(self) -> float:
        if self._clock() - self._read_at >= FRESH_S:
            self._read()
        while self._slowdown >= SLOW and self._waits > 0:
            self._waits -= 1
            self._sleep(WAIT_S)
            self._read()
        return self._slowdown

    def _read(self) -> float:
        self._read_at, self._slowdown = self._clock(), self._machine.slowdown()
        return self._slowdown


class MachineLog:
    """Snapshots of the machine by stage of a search."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.snapshots: dict[str, State] = {}

    @staticmethod
    def of(arch: Arch, slots: Sequence[Slot]) -> MachineLog:
        """Of the machine on whose first slot a search ranks and races."""
        gpu = slots[0].gpu if slots else None
        return MachineLog(machine_for(arch.kind, gpu_watcher(arch.name, gpu)))

    def snapshot(self, stage: str) -> State:
        """Keeps what the machine did since the last one."""
        state = self.snapshots[stage] = self.machine.look()
        return state

    def evidence(self) -> dict[str, str]:
        """What a plan keeps of the machine during its search and its race."""
        states = self.snapshots.values()
        worst = max(states, key=lambda state: (bool(state.reason), state.others))
        if not worst.reason:
            return {"machine": worst.word}
        printable = "".join(letter for letter in worst.reason if letter.isprintable())
        return {"machine": worst.word, "disturbed_by": printable[:REASON_LENGTH]}

    def warnings(self) -> tuple[str, ...]:
        """A line that says in which stages something disturbed the machine, and what it was."""
        disturbed = {stage: state for stage, state in self.snapshots.items() if state.reason}
        if not disturbed:
            return ()
        reason = max(disturbed.values(), key=lambda state: state.others).reason
        stages = " and ".join(disturbed)
        return (f"the machine was not quiet during {stages}: {reason}; times are less sure",)
