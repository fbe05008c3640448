"""The measuring worker as the search sees it: ask, and get an outcome whatever happens there."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from plantune.errors import MeasureTimeout, WorkerDied
from plantune.graph.graph import Graph
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.measure.child import Child
from plantune.measure.outcome import Outcome, Rejected, outcome_from_json
from plantune.measure.protocol import Message
from plantune.measure.race import BASELINES, Race, Workload
from plantune.measure.timing import Effort, Timing
from plantune.plan import Plan

# After these a worker may hold less memory than it should, or other numbers in it.
SPOILING_STAGES = ("memory", "numerics")


@dataclass(frozen=True)
class Limits:
    """What a worker may take, by this process's monotonic clock.

    `start_s` is on no candidate's clock. `build_s` is for one kernel or program, `run_s` for
    checking one and for calls that take long. Memory is on top of what the worker itself has.
    """

    start_s: float = 120.0
    build_s: float = 180.0
    run_s: float = 60.0
    memory_bytes: int = 4 << 30


class Worker:
    """A replaceable child process that checks and times.

    A candidate that hangs or crashes costs its own process alone; the next request gets a fresh
    one. One request runs at a time: threads wait for each other. `environment` is added to what the
    child inherits from this process's.
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        limits: Limits | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.threads = threads or torch.get_num_threads()
        self.limits = limits or Limits()
        self.environment = environment or {}
        self._lock = threading.Lock()
        self._child: Child | None = None

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Makes sure that a process waits; raises WorkerDied where it does not start."""
        with self._lock:
            self._ready()

    def close(self) -> None:
        """Ends the process, if there is one."""
        with self._lock:
            self._drop()

    @property
    def pid(self) -> int | None:
        """The process that waits or runs, None where there is none."""
        child = self._child
        return child.pid if child is not None and child.alive else None

    def check_and_time(
        self,
        step: Step,
        candidate: Candidate,
        arch: str,
        effort: Effort | None = None,
        seeds: tuple[int, ...] = (0, 1),
    ) -> Outcome:
        """Builds a candidate, checks it with each seed, then times it.

        Raises IllegalCandidate where it cannot run the step, WorkerFailed for what is no fault of a
        candidate, and WorkerDied where no worker can be started.
        """
        effort = effort or Effort()
        request = {
            "do": "check_and_time",
            "step": step.to_json(),
            "candidate": candidate.to_json(),
            "arch": arch,
            "effort": effort.to_json(),
            "seeds": list(seeds),
        }
        with self._lock:
            outcome = self._outcome(self._ready(), request, effort)
            if isinstance(outcome, Rejected) and outcome.stage in SPOILING_STAGES:
                self._drop()
        return outcome

    def _outcome(self, child: Child, request: Message, effort: Effort) -> Outcome:
        try:
            return outcome_from_json(self._ask(child, request, effort)["outcome"])
        except MeasureTimeout as error:
            return Rejected("timeout", str(error))
        except WorkerDied as error:
            return Rejected("crash", str(error))

    def time_programs(
        self, graph: Graph, plans: Sequence[Plan], effort: Effort | None = None, seed: int = 0
    ) -> list[Timing | Rejected]:
        """Times whole programs of one graph in turns, on the same random weights.

        Raises MeasureTimeout or WorkerDied where one of them takes the others along.
        """
        effort = effort or Effort(budget_s=2.0)
        request = {
            "do": "time_programs",
            "graph": graph.to_json(),
            "plans": [plan.to_json() for plan in plans],
            "effort": effort.to_json(),
            "seed": seed,
        }
        with self._lock:
            answer = self._ask(self._ready(), request, effort, len(plans))
        return [_timing(row) for row in answer["rows"]]

    def race(
        self,
        workload: Workload,
        plan: Plan | None,
        baselines: Sequence[str] = tuple(BASELINES),
        effort: Effort | None = None,
        seed: int = 0,
    ) -> Race:
        """Times a plan against the framework's ways to run a reference network, in turns.

        Raises WrongResult where the plan's output is not the network's.
        """
        unknown = [name for name in baselines if name not in BASELINES]
        if unknown:
            raise ValueError(f"no baseline is called {unknown}; known: {', '.join(BASELINES)}")
        effort = effort or Effort(budget_s=5.0)
        request = {
            "do": "race",
            "workload": workload.to_json(),
            "plan": None if plan is None else plan.to_json(),
            "baselines": list(baselines),
            "effort": effort.to_json(),
            "seed": seed,
        }
        with self._lock:
            answer = self._ask(self._ready(), request, effort, len(baselines) + 1)
        return Race.from_json(answer)

    def _ready(self) -> Child:
        if self._child is not None and not self._child.alive:
            self._drop()
        if self._child is None:
            self._child = Child(self.threads, self.limits.start_s, self.environment)
        return self._child

    def _ask(self, child: Child, request: Message, effort: Effort, ways: int = 1) -> Message:
        """The child's answer; after any error, an interrupt too, the child is not used again."""
        limits = self.limits
        limits_s = {
            "start": limits.run_s,
            "build": limits.build_s,
            "check": limits.run_s,
            "time": limits.run_s * ways + effort.most_s(ways),
        }
        try:
            return child.ask({**request, "memory_bytes": limits.memory_bytes}, limits_s)
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


def _timing(row: Message) -> Timing | Rejected:
    if "samples_us" in row:
        return Timing.from_json(row)
    outcome = outcome_from_json(row)
    assert isinstance(outcome, Rejected)
    return outcome
