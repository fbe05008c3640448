"""Processes that time on one GPU take turns, if PLANTUNE_TURNS names a file for it."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from plantune.base.environment_variables import turns_file

# Files for locks; a lock ends when its file is closed, also by a kill.
QUEUE, GPU = ".queue", ".gpu"


class Turn:
    """A process's turn. `begin` waits for it, and does nothing while it has begun or if no file is
    named. Whoever gives a turn back and asks again comes after those who wait.
    """

    def __init__(self) -> None:
        self._lock: TextIO | None = None

    def begin(self) -> None:
        path = turns_file()
        if path is None or self._lock is not None:
            return
        with _locked(path + QUEUE):
            self._lock = _locked(path + GPU)

    def end(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


@contextmanager
def turn() -> Iterator[None]:
    """A turn of this thread, which may be inside another one."""
    depth = getattr(_NESTED, "depth", 0)
    own = Turn()
    if not depth:
        own.begin()
    _NESTED.depth = depth + 1
    try:
        yield
    finally:
        _NESTED.depth = depth
        own.end()


_NESTED = threading.local()


def _locked(path: str) -> TextIO:
    file = open(os.path.abspath(path), "w", encoding="utf-8")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    return file
