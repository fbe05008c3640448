"""Compiles ahead while the worker measures, so that the next candidates are in the cache."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from plantune.devices.host import cxx_compiler, give_way
from plantune.errors import BuildError, PlantuneError
from plantune.measure.limits import REASON_LENGTH
from plantune.measure.worker.builder import Builder
from plantune.measure.worker.client import Worker
from plantune.plans.planner.candidates import LONG_BUILD_S, Key, StepCandidate
from plantune.space.arch import Arch

# Measuring and this process need a core each.
CORES_LEFT_FREE = 2
POLL_S = 0.05

Build = Callable[[StepCandidate], object]
Source = Callable[[StepCandidate], Hashable | None]


class Builds:
    """Threads that build what is wanted, in order, each in a process of its own.

    Without threads everything counts as ready, and the worker builds. `build` raises BuildError.
    Each thread begins with `prepare`. It `pauses` or not while something is timed.
    """

    def __init__(
        self,
        build: Build,
        source: Source,
        threads: int,
        prepare: Callable[[], object] = list,
        *,
        pauses: bool = False,
    ) -> None:
        self._build = build
        self._prepare = prepare
        self._source = source
        self._sources: dict[Key, Hashable | None] = {}
        # By source: None while it is built, then why it failed, else "".
        self._state: dict[Hashable, str | None] = {}
        self._built: set[Hashable] = set()
        self._wanted: list[StepCandidate] = []
        self._changed = threading.Condition()
        self._closed = False
        self.threads, self.pauses = threads, pauses
        for _ in range(threads):
            threading.Thread(target=self._work, daemon=True).start()

    def want(self, candidates: Iterable[StepCandidate]) -> None:
        """Builds these from now on, in this order, in place of what was wanted before."""
        with self._changed:
            self._wanted = [c for c in candidates if self._source_of(c) is not None]
            self._changed.notify_all()

    def is_ready(self, candidate: StepCandidate) -> bool:
        """Whether measuring it would not have to wait."""
        source = self._source_of(candidate)
        return not self.threads or source is None or self._state.get(source) is not None

    def failure(self, candidate: StepCandidate) -> str | None:
        """Why it does not build, if that is known."""
        source = self._source_of(candidate)
        found = None if source is None else self._state.get(source)
        return found[:REASON_LENGTH] if found else None

    @property
    def built(self) -> frozenset[Hashable]:
        """The sources that were built to the end."""
        with self._changed:
            return frozenset(self._built)

    def wait(self, candidates: Sequence[StepCandidate], seconds: float) -> bool:
        """Whether one of them became ready in time."""
        end = time.monotonic() + seconds
        with self._changed:
            while not any(map(self.is_ready, candidates)):
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, POLL_S))
        return True

    def close(self) -> None:
        """Starts no more builds; those that run are finished."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _source_of(self, candidate: StepCandidate) -> Hashable | None:
        if candidate.key not in self._sources:
            self._sources[candidate.key] = self._source(candidate)
        return self._sources[candidate.key]

    def _work(self) -> None:
        give_way()
        with suppress(PlantuneError):  # the first build raises it again
            self._prepare()
        while (candidate := self._next()) is not None:
            source, failure = self._source_of(candidate), ""
            try:
                self._build(candidate)
                with self._changed:
                    self._built.add(source)
            except BuildError as error:
                failure = error.what or "it does not build"
            except Exception:
                failure = ""  # The worker gets the same error and reports it.
            with self._changed:
                self._state[source] = failure
                self._changed.notify_all()

    def _next(self) -> StepCandidate | None:
        with self._changed:
            while not self._closed:
                for candidate in self._wanted:
                    source = self._source_of(candidate)
                    if source not in self._state:
                        self._state[source] = None
                        return candidate
                self._changed.wait()
        return None


class Times:
    """Tells `pause`, at each stage of each worker, whether any of them times now."""

    def __init__(self, pause: Callable[[bool], None]) -> None:
        self._pause = pause
        self._timing: set[int] = set()
        self._lock = threading.Lock()

    def of(self, worker: Worker) -> Callable[[str], None]:
        """The callback for the stages of a worker."""

        def on_stage(stage: str) -> None:
            with self._lock:
                (self._timing.add if stage == "time" else self._timing.discard)(id(worker))
                self._pause(bool(self._timing))

        return on_stage


@contextmanager
def builds_for(arch: Arch, *workers: Worker) -> Iterator[Builds]:
    """Builds while workers measure: for GPUs on the other cores, for a CPU in a process that is
    paused while a worker times.
    """
    if arch.kind == "cpu":
        with _paused_builds(arch, workers) as builds:
            yield builds
        return
    threads = max(len(os.sched_getaffinity(0)) - CORES_LEFT_FREE - len(workers[1:]), 1)
    builds = Builds(partial(_build_here, arch), partial(_source, arch), threads)
    try:
        yield builds
    finally:
        builds.close()


@contextmanager
def _paused_builds(arch: Arch, workers: Sequence[Worker]) -> Iterator[Builds]:
    builder = Builder(workers[0])
    # Its start would disturb the first times; without a compiler nothing may ever be built.
    prepare = builder.start if cxx_compiler() is not None else list
    times = Times(builder.pause)
    for each in workers:
        each.on_stage = times.of(each)
    build = partial(_build_in, builder, arch)
    builds = Builds(build, partial(built_as, arch), 1, prepare, pauses=True)
    try:
        yield builds
    finally:
        builds.close()
        for each in workers:
            each.on_stage = lambda stage: None
        builder.close()


def _build_in(builder: Builder, arch: Arch, candidate: StepCandidate) -> None:
    builder.build(candidate.step, candidate.candidate, arch.name)


def _build_here(arch: Arch, candidate: StepCandidate) -> object:
    chosen = candidate.chosen
    return chosen.family.build(chosen.parts, chosen.config, arch)


def _source(arch: Arch, candidate: StepCandidate) -> str | None:
    if not candidate.build_s:
        return None
    chosen = candidate.chosen
    return chosen.family.source(chosen.parts, chosen.config, arch)


def built_as(arch: Arch, candidate: StepCandidate) -> Hashable | None:
    """What is compiled for a candidate: a source that it shares with others, or its own."""
    is_long = candidate.build_s >= LONG_BUILD_S
    return _source(arch, candidate) or (candidate.key if is_long else None)
