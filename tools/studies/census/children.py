"""Runs measures in a process of its own, which may hang, crash or take all memory."""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rows import Key

Row = dict[str, Any]
# What is asked of a network, by its name.
Measure = Callable[[str, Any], Row]
# Torch and its caches grow with each network.
NETWORKS_PER_CHILD = 40


@dataclass(frozen=True)
class Limits:
    """Of one network and measure."""

    seconds: float = 120.0
    memory_gib: float = 8.0
    # Where kernels and proofs are kept; None for an empty folder of each process.
    cache: str | None = None


class Child:
    """One child at a time; the next one after a crash, a hang or NETWORKS_PER_CHILD networks."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._process: Any = None
        self._pipe: Connection | None = None
        self._left = 0

    def row(self, name: str, measure: Measure, asked: Any) -> Row:
        """What the measure says, or what became of the process that ran it."""
        if self._process is None or not self._left:
            self._start()
        assert self._pipe is not None
        self._left -= 1
        began = time.monotonic()
        try:
            self._pipe.send((name, measure, asked))
            if self._pipe.poll(self.limits.seconds):
                row: Row = self._pipe.recv()
                return {**row, "seconds": round(time.monotonic() - began, 1)}
        except (EOFError, BrokenPipeError):
            self._process.join()
            return self._lost(f"the process ended with code {self._process.exitcode}")
        return self._lost(f"took more than {self.limits.seconds:g} s")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def _lost(self, reason: str) -> Row:
        self.stop()
        return {"verdict": "failed", "reason": reason}

    def _start(self) -> None:
        self.stop()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.limits), daemon=True)
        self._process.start()
        theirs.close()
        self._left = NETWORKS_PER_CHILD


class Todo:
    """What is left, each once, for several threads; nothing more once the time is up."""

    def __init__(self, left: Iterator[Key], until: float) -> None:
        self._left, self._until, self._lock = left, until, threading.Lock()

    def take(self) -> Key | None:
        with self._lock:
            found = next(self._left, None)
            if found is None or time.monotonic() <= self._until:
                return found
        print("time is up: the same command goes on")
        return None


def _serve(pipe: Connection, limits: Limits) -> None:
    """In the child: answers until the parent is gone."""
    most = int(limits.memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    warnings.simplefilter("ignore")  # a network's advice to its own users
    with tempfile.TemporaryDirectory() as empty:
        # A plan that was proved before would not be proved again.
        os.environ["PLANTUNE_CACHE_DIR"] = limits.cache or empty
        while True:
            try:
                name, measure, asked = pipe.recv()
            except EOFError:
                return
            pipe.send(_answer(measure, name, asked))


def _answer(measure: Measure, name: str, asked: Any) -> Row:
    try:
        return measure(name, asked)
    except Exception as error:  # whatever a network or plantune raises is a row, with its place
        said = str(error).strip().partition("\n")[0]
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {said:.300} ({place.filename}:{place.lineno})"
        return {"verdict": "failed", "reason": reason}
