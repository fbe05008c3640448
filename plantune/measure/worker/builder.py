"""A process that builds for the measuring one, and is paused while that one times."""

from __future__ import annotations

import math
import threading

from plantune.errors import BuildError
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.measure.timing import Effort
from plantune.measure.worker.child import Child
from plantune.measure.worker.client import Worker
from plantune.measure.worker.work import build_ahead, request


class Builder(Worker):
    """Builds for a worker; what it compiles is in the caches of the disk then.

    Started with the first build, by the thread that asks for it and as nice as that one is.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(
            threads=worker.threads, limits=worker.limits, environment=worker.environment
        )
        self._paused = self._closed = False
        self._state = threading.Lock()

    def build(self, step: Step, candidate: Candidate, arch: str) -> None:
        """Raises BuildError, or what ended the process: then the next build has a new one."""
        asked = request(build_ahead, step, candidate, arch)
        with self._lock:
            rejected = self._ask(self._ready(Effort()), asked, arch, Effort())
        if rejected is not None:
            raise BuildError(rejected.reason)

    def pause(self, paused: bool) -> None:
        """Stops the process and its compilers, or lets them go on."""
        with self._state:
            self._paused = paused
            if self._child is not None:
                self._child.stop(paused)

    def close(self) -> None:
        """Ends the process, whatever it builds."""
        with self._state:
            self._closed = True
            if self._child is not None:
                self._child.kill()
        super().close()

    def _new_child(self, most_s: float = math.inf) -> Child:
        child = super()._new_child(most_s)
        with self._state:
            self._child = child
            child.stop(self._paused)
            if self._closed:
                child.kill()
        return child
