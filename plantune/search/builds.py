"""Compiles ahead while the worker measures: what it asks for next lies in the cache by then."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from plantune.errors import BuildError
from plantune.kernels.registry import family_named
from plantune.measure.builder import Builder
from plantune.measure.client import Worker
from plantune.search.options import LONG_BUILD_S, Try
from plantune.space.arch import Arch

# Measuring and this process need a core each.
CORES_LEFT_FREE = 2
NICENESS = 10
POLL_S = 0.05

Build = Callable[[Try], object]
Source = Callable[[Try], Hashable | None]


class Builds:
    """Threads that build what is wanted, in that order, each in another process.

    Without threads everything counts as ready: then the worker builds. `build` raises BuildError.
    """

    def __init__(
        self, build: Build, source: Callable[[Try], Hashable | None], threads: int
    ) -> None:
        self._build = build
        self._source = source
        self._sources: dict[object, Hashable | None] = {}
        # By source: None while it is built, then why it failed, or "".
        self._state: dict[Hashable, str | None] = {}
        self._wanted: list[Try] = []
        self._changed = threading.Condition()
        self._closed = False
        self.threads = threads
        for _ in range(threads):
            threading.Thread(target=self._work, daemon=True).start()

    def want(self, tries: Iterable[Try]) -> None:
        """What to build from now on, in this order; what was wanted before no longer is."""
        with self._changed:
            self._wanted = [t for t in tries if self._source_of(t) is not None]
            self._changed.notify_all()

    def is_ready(self, tried: Try) -> bool:
        """Whether measuring it would not have to wait."""
        source = self._source_of(tried)
        return not self.threads or source is None or self._state.get(source) is not None

    def failure(self, tried: Try) -> str | None:
        """Why it does not build, where that is known."""
        source = self._source_of(tried)
        return None if source is None else self._state.get(source) or None

    def wait(self, tries: Sequence[Try], seconds: float) -> bool:
        """Whether one of them became ready in time."""
        end = time.monotonic() + seconds
        with self._changed:
            while not any(map(self.is_ready, tries)):
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, POLL_S))
        return True

    def close(self) -> None:
        """What is being built is still finished."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _source_of(self, tried: Try) -> Hashable | None:
        if tried.key not in self._sources:
            self._sources[tried.key] = self._source(tried)
        return self._sources[tried.key]

    def _work(self) -> None:
        if sys.platform == "linux":
            os.nice(NICENESS)  # of this thread and of the compilers that it starts
        while (tried := self._next()) is not None:
            source, failure = self._source_of(tried), ""
            try:
                self._build(tried)
            except BuildError as error:
                failure = error.what or "it does not build"
            except Exception:
                failure = ""  # The worker meets it again and says what it is.
            with self._changed:
                self._state[source] = failure
                self._changed.notify_all()

    def _next(self) -> Try | None:
        with self._changed:
            while not self._closed:
                for tried in self._wanted:
                    source = self._source_of(tried)
                    if source not in self._state:
                        self._state[source] = None
                        return tried
                self._changed.wait()
        return None


@contextmanager
def builds_for(arch: Arch, worker: Worker) -> Iterator[Builds]:
    """Builds beside what a worker measures: for a GPU on the other cores, for a CPU in a process
    that stands still while the worker times.
    """
    if arch.kind == "cpu":
        builder = Builder(worker)
        worker.on_stage = lambda stage: builder.pause(stage == "time")
        builds = Builds(partial(_build_in, builder, arch), partial(_built_as, arch), 1)
    else:
        builder = None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = max((cores or 1) - CORES_LEFT_FREE, 1)
        builds = Builds(partial(_build_here, arch), partial(_source, arch), threads)
    try:
        yield builds
    finally:
        builds.close()
        if builder is not None:
            worker.on_stage = lambda stage: None
            builder.close()


def _build_in(builder: Builder, arch: Arch, tried: Try) -> None:
    builder.build(tried.step, tried.candidate, arch.name)


def _build_here(arch: Arch, tried: Try) -> object:
    return family_named(tried.candidate.family).build(tried.step, tried.candidate.config, arch)


def _source(arch: Arch, tried: Try) -> str | None:
    family = family_named(tried.candidate.family)
    return family.source(tried.step, tried.candidate.config, arch) if family.build_s else None


def _built_as(arch: Arch, tried: Try) -> Hashable | None:
    """What is compiled for a candidate: a source that it shares with others, or its own."""
    long = family_named(tried.candidate.family).build_s >= LONG_BUILD_S
    return _source(arch, tried) or (tried.key if long else None)
