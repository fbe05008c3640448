"""Ctrl-C in a search from Python: the first one ends the search, a second one is raised."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from plantune.search.results import Progress, Report


class FirstInterrupt:
    """What became of Ctrl-C so far. The first one is raised inside of `ending` alone: elsewhere
    what goes on is short, and its result is wanted.
    """

    def __init__(self) -> None:
        self._count = 0
        self._is_ending = self._is_saving = False

    @property
    def requested(self) -> bool:
        return self._count > 0

    @property
    def again(self) -> bool:
        """Whether there was a second one."""
        return self._count > 1

    @contextmanager
    def ending(self) -> Iterator[None]:
        """The first one ends what goes on inside, by a KeyboardInterrupt. A second one that came
        while that was saved is raised at the end.
        """
        self._is_ending = True
        try:
            yield
        finally:
            self._is_ending = False
        if self.again:
            raise KeyboardInterrupt

    @contextmanager
    def saving(self) -> Iterator[None]:
        """No other one ends the saving of what there is."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def reported(self, report: Report) -> Report:
        """The report that also raises again what a finalizer swallowed."""

        def reporting(progress: Progress) -> None:
            if self.requested:
                raise KeyboardInterrupt
            report(progress)

        return reporting

    def handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if not self._is_saving and (self._is_ending or self.again):
            raise KeyboardInterrupt


@contextmanager
def first_interrupt() -> Iterator[FirstInterrupt]:
    """Ctrl-C is counted inside, by the main thread alone: no other one gets signals. Where it is
    ignored, as under nohup, it stays so.
    """
    state, before = FirstInterrupt(), signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before in (signal.SIG_IGN, None):
        yield state
        return
    signal.signal(signal.SIGINT, state.handle)
    try:
        yield state
    finally:
        signal.signal(signal.SIGINT, before)
