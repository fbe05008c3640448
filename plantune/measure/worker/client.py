"""The measuring worker as the search sees it: ask, and get an outcome whatever happens there."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from plantune.base.nearest import hint
from plantune.base.outcome import Outcome, Rejected
from plantune.devices.device import first_line
from plantune.errors import MeasureTimeout, OutOfTime, PlantuneError, UnsupportedDevice, WorkerDied
from plantune.graph import Graph, Step
from plantune.kernels.family import Candidate
from plantune.measure.programs import PassCost, time_programs
from plantune.measure.racing.race import Race, race
from plantune.measure.racing.routes import framework_routes
from plantune.measure.subject import Raced
from plantune.measure.timing import Effort, Timing
from plantune.measure.worker import work
from plantune.measure.worker.child import Child
from plantune.measure.worker.reserve import Reserve, warmed_up
from plantune.measure.worker.work import Request, request
from plantune.plans.plan import Plan
from plantune.space.arch import load_arch

T = TypeVar("T")
# After these a worker may hold less memory than it should, or other numbers in it.
SPOILING_STAGES = ("memory", "numerics", "crash")
# These stages may mean that the GPU itself is gone: off the bus, or with uncorrectable memory.
DEADLY_STAGES = ("crash", "timeout")
# Signals that no kernel causes: a candidate whose worker got one is tried once more.
SENT = ("SIGKILL", "SIGSTOP")


@dataclass(frozen=True)
class Limits:
    """What a worker may take, by this process's monotonic clock.

    `start_s` is on no candidate's clock. `build_s` is for one kernel or program, `run_s` for
    checking one and for calls that take long. Memory is on top of what the worker itself has, and
    limited on the CPU only: kernels of GPUs are compiled in processes with a limit of their own.
    """

    start_s: float = 120.0
    build_s: float = 180.0
    run_s: float = 60.0
    memory_bytes: int = 4 << 30

    def memory_on(self, arch: str) -> int | None:
        """What work for an arch may allocate; None if that is not limited."""
        return self.memory_bytes if load_arch(arch).kind == "cpu" else None


class Worker:
    """A replaceable child process that checks and times.

    A candidate that hangs or crashes costs its own process alone; the next request gets a fresh
    one. One request runs at a time: threads wait for each other. `environment` is added to what the
    child inherits from this process's. With `reserve`, the name of an arch, another process waits
    ready for it: on a GPU many faults end one, and a new one takes 3 s. Without one, a process is
    started on entering, or with the first request, which may cut it off, if not `at_once`.
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        limits: Limits | None = None,
        environment: Mapping[str, str] | None = None,
        reserve: str | None = None,
        at_once: bool = True,
    ) -> None:
        self.threads = threads or torch.get_num_threads()
        self.limits = limits or Limits()
        self.environment = environment or {}
        # Told of each stage that begins, and of "idle" after the last one.
        self.on_stage: Callable[[str], object] = lambda stage: None
        self._lock = threading.Lock()
        self._closing = False
        self._child: Child | None = None
        self._at_once = at_once
        self._reserve = None if reserve is None else Reserve(self._new_child, reserve)

    def __enter__(self) -> Worker:
        if self._reserve is not None:
            self._reserve.fill()  # the first request takes it; until then both have time
        elif self._at_once:
            self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, cut_at: float | None = None) -> None:
        """Makes sure that a process waits; raises WorkerDied if it does not start, OutOfTime
        if it has not done so by `cut_at`.
        """
        with self._lock:
            self._ready(Effort(cut_at=cut_at))

    def settle(self) -> None:
        """Waits until the process in reserve has started, which disturbs what is timed."""
        if self._reserve is not None:
            self._reserve.wait()

    def close(self) -> None:
        """Ends the process, if there is one, whatever another thread asks it."""
        self._closing = True
        if (child := self._child) is not None:
            child.kill()
        with self._lock:
            self._closing = False
            self._drop()
            if self._reserve is not None:
                self._reserve.close()

    @property
    def pid(self) -> int | None:
        """The process that waits or runs, None if there is none."""
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

        Raises IllegalCandidate if it cannot run the step, WorkerFailed for faults that are not the
        candidate's, WorkerDied if no worker can be started, UnsupportedDevice if the GPU was lost,
        and OutOfTime at the effort's `cut_at`, as `time_programs` and `race` do.
        """
        effort = effort or Effort()
        asked = request(work.check_and_time, step, candidate, arch, effort, seeds)
        with self._lock:
            outcome = self._outcome(asked, arch, effort)
            if isinstance(outcome, Rejected) and outcome.stage in DEADLY_STAGES:
                self._prove(arch)
        return outcome

    def check_elsewhere(
        self, step: Step, candidate: Candidate, arch: str, seeds: tuple[int, ...] = (0, 1)
    ) -> Rejected | None:
        """Checks the numbers of a candidate for an arch that is not here on a later GPU, through
        PTX; None if they are right.
        """
        asked = request(work.check_elsewhere, step, candidate, arch, seeds)
        with self._lock:
            return self._outcome(asked, arch, Effort())

    def _outcome(
        self, asked: Request[T], arch: str, effort: Effort, *, again: bool = True
    ) -> T | Rejected:
        """The answer for one candidate, which is rejected if it ends the process, `again` if that
        was killed from elsewhere.
        """
        child = self._ready(effort)
        try:
            found: T | Rejected = self._ask(child, asked, arch, effort)
        except MeasureTimeout as error:
            return Rejected("timeout", str(error))
        except WorkerDied as error:
            if again and error.how.startswith(SENT) and not self._closing:
                return self._outcome(asked, arch, effort, again=False)
            return Rejected("crash", str(error))
        if isinstance(found, Rejected) and found.stage in SPOILING_STAGES:
            self._drop()
        return found

    def time_programs(
        self, graph: Graph, plans: Sequence[Plan], effort: Effort | None = None, seed: int = 0
    ) -> list[Timing | Rejected]:
        """Times whole programs of one graph in turns, on the same random weights.

        Raises MeasureTimeout or WorkerDied if one of them crashes the worker of all.
        """
        effort = effort or Effort(budget_s=2.0)
        arch = plans[0].problem.arch if plans else ""
        asked = request(time_programs, graph, tuple(plans), effort, seed)
        with self._lock:
            return self._ask_for_all(asked, arch, effort, len(plans))

    def rooflines(self, steps: Sequence[Step], arch: str) -> list[float]:
        """The least that each step can take on this machine, in microseconds."""
        asked = request(work.rooflines, tuple(steps), arch)
        with self._lock:
            return self._ask_for_all(asked, arch, Effort(), 1)

    def pass_cost(
        self, graph: Graph, plan: Plan, runs: int, effort: Effort | None = None, seed: int = 0
    ) -> PassCost | Rejected:
        """What a pass of a plan costs, in so many runs, for which there is `effort`'s budget."""
        effort = effort or Effort(budget_s=10.0)
        asked = request(work.pass_cost, graph, plan, runs, seed)
        with self._lock:
            return self._ask_for_all(asked, plan.problem.arch, effort, 1)

    def race(
        self,
        raced: Raced,
        plan: Plan | None,
        routes: Sequence[str] | None = None,
        effort: Effort | None = None,
        seed: int = 0,
        *,
        detailed: bool = False,
    ) -> Race:
        """Times a plan against the framework's routes to run a network, in turns.

        Without `routes` all of the arch take part. For `detailed` see `race`. Raises WrongResult
        where the plan's output is not the network's.
        """
        problem = raced.problem
        known = framework_routes(problem.arch, problem.mode)
        routes = known if routes is None else tuple(routes)
        unknown = [name for name in routes if name not in known]
        if unknown:
            listed = f"{', '.join(known)}{hint(unknown[0], known)}"
            raise ValueError(f"no route is called {unknown}; known: {listed}")
        effort = effort or Effort(budget_s=5.0)
        count = (len(routes) + 2) * 2  # each on two kinds of images
        asked = request(race, raced, plan, routes, effort, seed, detailed=detailed)
        with self._lock:
            return self._ask_for_all(asked, problem.arch, effort, count)

    def _ready(self, effort: Effort) -> Child:
        if self._child is not None and not self._child.alive:
            self._drop()
        if self._closing:
            raise WorkerDied("the measuring worker is being closed")
        if self._child is None:
            spare = None if self._reserve is None else self._reserve.take()
            self._child = spare or self._started(effort.cut_at)
            if self._reserve is not None:
                self._reserve.fill()
        return self._child

    def _started(self, cut_at: float | None, *, again: bool = True) -> Child:
        """A new child, a second one if somebody killed the first; raises OutOfTime if `cut_at`
        comes before it is ready.
        """
        left_s = math.inf if cut_at is None else max(cut_at - time.monotonic(), 0.0)
        try:
            return self._new_child(left_s)
        except WorkerDied as error:
            if cut_at is not None and time.monotonic() >= cut_at:
                raise OutOfTime("the time was over before the measuring worker started") from error
            if again and error.how.startswith(SENT) and not self._closing:
                return self._started(cut_at, again=False)
            raise

    def _new_child(self, most_s: float = math.inf) -> Child:
        return Child(self.threads, min(self.limits.start_s, most_s), self.environment)

    def _ask(self, child: Child, asked: Request[T], arch: str, effort: Effort, count: int = 1) -> T:
        """The child's answer; after any error, an interrupt too, the child is not used again."""
        limits = self.limits
        limits_s = {
            "start": limits.run_s,
            "build": limits.build_s,
            "check": limits.run_s,
            "time": limits.run_s * count + effort.most_s(count),
        }
        memory_bytes = limits.memory_on(arch) if arch else None
        child.on_stage = self.on_stage
        try:
            answer = child.ask(asked.message(memory_bytes), limits_s, effort.cut_at)
        except BaseException:
            self._drop()
            raise
        finally:
            self.on_stage("idle")
        return asked.result(answer)

    def _ask_for_all(self, asked: Request[T], arch: str, effort: Effort, count: int) -> T:
        """The answer for several routes at once, one of which may crash the worker of all."""
        child = self._ready(effort)
        try:
            return self._ask(child, asked, arch, effort, count)
        except (MeasureTimeout, WorkerDied):
            if arch:
                self._prove(arch)
            raise

    def _prove(self, arch: str) -> None:
        """Shows by a fresh process that what took the last one along left the GPU intact.

        Raises UnsupportedDevice if it did not: then candidates are not to blame.
        """
        if load_arch(arch).kind == "cpu":
            return
        child = self._ready(Effort())
        try:
            warmed_up(child, arch)
        except BaseException as error:
            self._drop()
            if not isinstance(error, PlantuneError):
                raise
            raise UnsupportedDevice(
                f"the GPU for {arch} no longer responds ({first_line(error)}); see nvidia-smi"
            ) from error

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()
