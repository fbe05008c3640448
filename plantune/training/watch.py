"""Ends a process whose training step waits for a rank that will not come.

NCCL's own watchdog sees no collective that a graph replays: a rank whose peer is gone would wait in
its next synchronisation for ever.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from plantune.training.ranks import Ranks

TICK_S = 0.25
# What is told at the end must be told in that time; then others have some ticks to hear it, if
# it is this process that keeps the store.
LAST_S, HEARD_S = 10.0, 3 * TICK_S
EXIT_CODE = 1
# How long a call may go on once the store is gone, with the process that kept it.
WITHOUT_STORE_S = 30.0


class Watch:
    """Follows the steps of one rank from a thread of its own, in which it gives signs of life.

    A step may wait for others for `ranks.deadline_s`. After that, or once a rank that it waits for
    has left, the process ends with a message. That ends its collectives, too. A communicator that
    is aborted before releases the main thread, and what that does then ended half of all processes
    by SIGABRT; a graph that is dropped before waits for its collective (H200s, 2026-11-23).

    At an orderly end of the process `drop` is called.
    """

    def __init__(self, ranks: Ranks, device: torch.device, drop: Callable[[], None]) -> None:
        self._ranks, self._device = ranks, device
        self._drop = weakref.WeakMethod(drop)
        self._lock = threading.Lock()
        # Calls with the event at their end: the last one, and one that the thread waits for.
        self._latest: tuple[int, torch.cuda.Event] | None = None
        self._sample: tuple[int, torch.cuda.Event] | None = None
        self._running = False
        self._seen, self._since_s = -1, 0.0
        self._stop = threading.Event()
        weakref.finalize(self, self._stop.set).atexit = False
        atexit.register(_leave, weakref.ref(self))
        ranks.report()
        arguments = (weakref.ref(self), self._stop)
        threading.Thread(target=_follow, args=arguments, daemon=True, name="plantune").start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, a step is enqueued, or on a CPU runs. If it raises, others need not wait."""
        ranks = self._ranks
        ranks.begin()
        self._running = True
        try:
            yield
        except BaseException as error:
            ranks.leave(f"raised {_text(error)} in its call {ranks.call}", ranks.call - 1)
            raise
        finally:
            self._running = False
        # In a capture of the caller's nothing runs now.
        if self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            with self._lock:
                event = torch.cuda.Event() if self._latest is None else self._latest[1]
                event.record(torch.cuda.current_stream(self._device))
                self._latest = (ranks.call, event)

    def stop(self) -> None:
        self._stop.set()

    def look(self) -> None:
        """What the thread does at each tick."""
        ranks, now_s = self._ranks, time.monotonic()
        call, why, most_s = self._waiting(), None, self._ranks.deadline_s
        if call is None or call != self._seen:
            self._seen, self._since_s = -1 if call is None else call, now_s
        try:
            ranks.report()
            why = None if call is None else self._why_in_vain(call)
        except RuntimeError:
            most_s = min(most_s, WITHOUT_STORE_S)
        if call is not None and why is None and now_s - self._since_s > most_s:
            why = f"it has waited more than {most_s:g} s; {self._heard()}"
        if why is not None:
            self._end(f"call {call} of its training step cannot end: {why}")

    def _waiting(self) -> int | None:
        """The number of a call that is not over, if it waits for nothing but other ranks."""
        if self._running and self._ranks.is_past:
            return self._ranks.call
        with self._lock:
            if self._sample is None:
                self._sample, self._latest = self._latest, None
        try:
            if self._sample is not None and self._sample[1].query():
                self._sample = None
        except RuntimeError:  # the CUDA context is lost, which the caller's own calls tell
            self._sample = None
            self.stop()
        return None if self._sample is None else self._sample[0]

    def _heard(self) -> str:
        try:
            return "; ".join(map(self._ranks.heard_of, self._ranks.others))
        except RuntimeError:
            return "the store of the process group is gone, with the process that kept it"

    def _why_in_vain(self, call: int) -> str | None:
        for rank in self._ranks.others:
            left = self._ranks.left(rank)
            if left is not None and left[0] < call:
                return f"rank {rank} {left[1]}"
        return None

    def _end(self, why: str) -> None:
        ranks = self._ranks
        with suppress(Exception):  # nobody may read it any more
            sys.stderr.write(f"plantune: rank {ranks.rank} ends: {why}\n")
            sys.stderr.flush()
        threading.Thread(target=_exit_later, daemon=True).start()
        with suppress(Exception):
            ranks.leave(f"ended, as {why}", ranks.call - 1)
            time.sleep(HEARD_S)
        os._exit(EXIT_CODE)

    def _let_go(self) -> None:
        drop = self._drop()
        if drop is not None:
            drop()

    def leave(self) -> None:
        """At the end of the process: no graph may hold a collective when torch ends these. The
        thread goes on meanwhile, as a graph may wait in its collective for a rank that is gone.
        """
        error = getattr(sys, "last_value", None)
        how = "ended" if error is None else f"ended by {_text(error)}"
        self._ranks.leave(f"{how} after its call {self._ranks.call}", self._ranks.call)
        self._let_go()
        self.stop()


def _follow(watched: weakref.ref[Watch], stop: threading.Event) -> None:
    while not stop.wait(TICK_S):
        watch = watched()
        if watch is None:
            return
        watch.look()
        del watch


def _leave(watched: weakref.ref[Watch]) -> None:
    watch = watched()
    if watch is not None:
        watch.leave()


def _exit_later() -> None:
    time.sleep(LAST_S)
    os._exit(EXIT_CODE)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
