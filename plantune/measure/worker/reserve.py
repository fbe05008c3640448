"""A worker process that waits until the one in use has to be replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable

from plantune.errors import PlantuneError
from plantune.measure.worker.child import Child
from plantune.measure.worker.work import request, warm_up

WARM_UP_S = 60.0


def warmed_up(child: Child, arch: str) -> None:
    """Has it do its first work for an arch; raises what that raises."""
    child.ask(request(warm_up, arch).message(), {"start": WARM_UP_S})


class Reserve:
    """Keeps at most one child, started in the background and warmed up for an arch."""

    def __init__(self, start: Callable[[], Child], arch: str) -> None:
        self._start = start
        self._arch = arch
        self._child: Child | None = None
        self._thread: threading.Thread | None = None

    def fill(self) -> None:
        """Starts a child, if none is there; returns at once."""
        if self._child is None and self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Waits until a child that was started is warmed up."""
        if self._thread is not None:
            self._thread.join()

    def take(self) -> Child | None:
        """The child, once it is ready; None if there is none or it did not start."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        child, self._child = self._child, None
        if child is not None and not child.alive:
            child.end()
            return None
        return child

    def close(self) -> None:
        child = self.take()
        if child is not None:
            child.end()

    def _run(self) -> None:
        child = None
        try:
            child = self._start()
            warmed_up(child, self._arch)
        except PlantuneError:  # The next one is started when it is needed, and says why.
            if child is not None:
                child.end()
            return
        self._child = child
