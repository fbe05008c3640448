"""A process that builds for the measuring one, and stands still while that one times."""

from __future__ import annotations

import threading

from plantune.errors import BuildError
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.measure.child import Child
from plantune.measure.client import Worker


class Builder:
    """Builds for one worker; what it compiles is in the caches of the disk then.

    Started with the first build, by the thread that asks for it and as nice as that one is.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._child: Child | None = None
        self._paused = False
        self._closed = False
        self._lock = threading.Lock()
        self._asking = threading.Lock()

    def build(self, step: Step, candidate: Candidate, arch: str) -> None:
        """Raises BuildError, or what ended the process: then the next build has a new one."""
        request = {
            "do": "build",
            "step": step.to_json(),
            "candidate": candidate.to_json(),
            "arch": arch,
            "memory_bytes": self._worker.limits.memory_on(arch),
        }
        with self._asking:
            child = self._ready()
            try:
                answer = child.ask(request, {"start": self._worker.limits.build_s})
            except BaseException:
                self._drop()
                raise
        if answer["failure"] is not None:
            raise BuildError(answer["failure"])

    def pause(self, paused: bool) -> None:
        """Stops the process and its compilers, or lets them go on."""
        with self._lock:
            self._paused = paused
            if self._child is not None:
                self._child.stop(paused)

    def close(self) -> None:
        """Ends the process, whatever it builds."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.kill()
        with self._asking:
            self._drop()

    def _ready(self) -> Child:
        if self._child is not None and self._child.alive:
            return self._child
        self._drop()
        worker = self._worker
        child = Child(worker.threads, worker.limits.start_s, worker.environment)
        with self._lock:
            self._child = child
            child.stop(self._paused)
            if self._closed:
                child.kill()
        return child

    def _drop(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.end()
