"""Measures candidates beside each other: one measuring worker for each slot, such as a GPU."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from plantune.base.outcome import Outcome
from plantune.base.warning import warn
from plantune.devices.cuda.flags import Precisions, float32_precisions, planned_for
from plantune.errors import UnsupportedDevice, WorkerDied
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.plans.planner.candidates import Key, StepCandidate

# After these errors a slot is lost, and another one measures its candidates.
LOST = (UnsupportedDevice, WorkerDied)
# Candidates queued per slot: with fewer, a slot would often find none of a step that it knows, and
# making a step's references takes as long as measuring three candidates.
WAITING = 3


class Measurer(Protocol):
    """Checks and times one candidate, without risk for this process."""

    def measure(self, step: Step, candidate: Candidate, limit_us: float) -> Outcome:
        """The outcome; raises only what ends the search. Above the limit a rough time is enough."""


class Shared(Protocol):
    """What several searches know together, and who of them measures what."""

    def new_outcomes(self) -> Iterable[tuple[Key, Outcome]]:
        """What others found since the last call."""

    def has(self, candidate: StepCandidate) -> bool:
        """Whether another search measures it now."""

    @property
    def searches(self) -> int:
        """How many there are."""

    def spread(self, candidates: Sequence[StepCandidate]) -> list[StepCandidate]:
        """The candidates in an order in which searches begin at different ones."""

    def claim(self, *candidates: StepCandidate) -> Sequence[StepCandidate]:
        """Takes those to which no other search was first."""

    def report(self, candidate: StepCandidate, outcome: Outcome | None) -> None:
        """Gives the outcome of what was claimed to the others; None gives it back unmeasured."""


@dataclass(frozen=True)
class Done:
    """What became of a candidate; without an outcome it was not measured."""

    candidate: StepCandidate
    outcome: Outcome | None
    seconds: float


@dataclass(frozen=True)
class _Job:
    candidate: StepCandidate
    limit_us: float
    precisions: Precisions  # for which the search makes its plan


@dataclass(frozen=True)
class _Ended:
    job: _Job
    seconds: float
    outcome: Outcome | None = None
    error: BaseException | None = None
    lost: int | None = None


class WorkerPool:
    """Measurers with a slot each. One alone works in the calling thread; several have threads, and
    candidates wait for them, so that no slot does while the next ones are chosen. A slot takes one
    of a step that it has measured, if there is one: it has the references for that step.

    A slot that is lost is warned of, and the others go on; the last one's error is raised. With
    `shared` other searches measure too.
    """

    def __init__(
        self,
        measurers: Sequence[Measurer],
        names: Sequence[str] = (),
        shared: Shared | None = None,
    ) -> None:
        self.shared = shared
        self._measurers = list(measurers)
        self._names = [*names, *map(str, range(len(names), len(measurers)))]
        self._doing: dict[int, StepCandidate] = {}
        self._flight: dict[Key, StepCandidate] = {}
        self._waiting: list[_Job] = []
        self._changed = threading.Condition()
        self._seen: list[set[str]] = [set() for _ in self._measurers]
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self.slots = len(self._measurers)
        self._room = 1 if self.slots == 1 else (1 + WAITING) * self.slots
        for slot in range(self.slots if self.slots > 1 else 0):
            threading.Thread(target=self._work, args=(slot,), daemon=True).start()

    @property
    def is_full(self) -> bool:
        """Whether nothing more can be started."""
        return len(self._flight) >= self._room

    @property
    def is_busy(self) -> bool:
        """Whether each slot has something to measure now, and next."""
        return len(self._flight) >= min(2 * self.slots, self._room)

    @property
    def is_idle(self) -> bool:
        return not self._flight

    def has(self, candidate: StepCandidate) -> bool:
        """Whether it is being measured, or waits for that."""
        return candidate.key in self._flight

    def doing(self) -> tuple[str, ...]:
        """What each slot measures, for people; nothing if there is one alone."""
        if len(self._measurers) == 1:
            return ()
        return tuple(
            f"{self._names[slot]} {c.step.name}: {c.candidate.family}"
            for slot, c in sorted(self._doing.copy().items())
        )

    def start(self, candidate: StepCandidate, limit_us: float) -> None:
        """Has a candidate measured, by the calling thread if there is one slot."""
        self._flight[candidate.key] = candidate
        job = _Job(candidate, limit_us, float32_precisions())
        if len(self._measurers) > 1:
            with self._changed:
                self._waiting.append(job)
                self._changed.notify()
            return
        try:
            self._ended.put(self._measured(0, job))
        except BaseException:
            del self._flight[candidate.key]
            raise

    def finished(self, timeout_s: float | None = None) -> Done | None:
        """The next candidate that was measured; None after `timeout_s`. Raises what ended one."""
        try:
            ended = self._ended.get(timeout=timeout_s)
        except queue.Empty:
            return None
        candidate = ended.job.candidate
        del self._flight[candidate.key]
        if ended.lost is not None:
            self._lose(ended)
        elif ended.error is not None:
            raise ended.error
        return Done(candidate, ended.outcome, ended.seconds)

    def _lose(self, ended: _Ended) -> None:
        assert ended.error is not None
        self.slots -= 1
        self._room -= 1 + WAITING
        if not self.slots:
            raise ended.error
        text = f"{self._names[ended.lost or 0]} was lost, the others go on: {ended.error}"
        warn(text)

    def _work(self, slot: int) -> None:
        while True:
            job = self._next(slot)
            start = time.monotonic()
            self._doing[slot] = job.candidate
            try:
                self._ended.put(self._measured(slot, job))
            except LOST as error:
                seconds = time.monotonic() - start
                self._ended.put(_Ended(job, seconds, error=error, lost=slot))
                return
            except Exception as error:  # The thread that asks for it raises it.
                self._ended.put(_Ended(job, time.monotonic() - start, error=error))
            finally:
                del self._doing[slot]

    def _next(self, slot: int) -> _Job:
        """The next job of a step that this slot knows, else of one that no other slot knows."""
        with self._changed:
            while not self._waiting:
                self._changed.wait()

            def place(job: _Job) -> int:
                signature = job.candidate.step.signature
                known = [signature in seen for seen in self._seen]
                return 0 if known[slot] else 1 + any(known)

            job = min(self._waiting, key=place)
            self._waiting.remove(job)
            self._seen[slot].add(job.candidate.step.signature)
            return job

    def _measured(self, slot: int, job: _Job) -> _Ended:
        start = time.monotonic()
        step, config = job.candidate.step, job.candidate.candidate
        with planned_for(job.precisions):
            outcome = self._measurers[slot].measure(step, config, job.limit_us)
        return _Ended(job, time.monotonic() - start, outcome)
