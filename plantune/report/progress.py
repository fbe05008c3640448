"""Progress on stderr: one line that changes on a terminal, else a few lines."""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self, TextIO

from plantune.report.tables import ms_text

if TYPE_CHECKING:
    from plantune.search.results import Progress, StepsSum

EVERY_S = 5.0
# Between two lines about one long task, where lines cannot be written over.
LONG_S = 30.0
TICK_S = 1.0


# What each stage of a search is called where people read it; data keep the stages' own names.
STAGES = {
    "preparing": "preparing",
    "building a known plan": "compiling the best plan known so far",
    "timing known plans": "timing plans known so far",
    "measuring": "trying kernels",
    "ranking": "comparing whole plans",
    "racing": "racing the best plan against the framework",
    "proving": "checking the plan's results",
    "waiting for others": "waiting for other searches",
}


def stage_text(stage: str) -> str:
    """What is being done in a stage, in words for people who have not read the code."""
    return STAGES.get(stage, stage)


def progress_text(progress: Progress) -> str:
    """What is being done, the time that is left, the best time so far beside eager's, and how many
    kernels were tried. A narrow terminal cuts off the end, so what matters most comes first.
    """
    left_s = progress.seconds_left
    left = f"{left_s:.0f} s left" if left_s >= 0.5 else "time is up"
    tried, parts = progress.measured + progress.rejected, []
    if math.isfinite(progress.whole_us):
        parts.append(f"best so far {ms_text(progress.whole_us / 1e3)}")
    elif (best := _sum_text(progress.best)) is not None:
        parts.append(f"best so far {best}")
    if (eager := _sum_text(progress.framework)) is not None:
        parts.append(f"eager {eager}")
    parts.append(f"{tried:,} of {progress.candidates:,} kernels tried")
    parts += [f"now {progress.detail}"] if progress.detail else []
    return f"{stage_text(progress.stage)}, {left}: {', '.join(parts)}"


def _sum_text(steps: StepsSum) -> str | None:
    """The time of a whole network by its steps alone, which is not exact; None if not known."""
    if not 0 < steps.us < math.inf:
        return None
    return f"{'perhaps' if steps.estimated else 'about'} {ms_text(steps.us / 1e3)}"


class StatusLine:
    """What a command does now. `end`, or the end of its context, before anything else is written.

    Without a terminal, or what else `rewrites` a line, one is written when `stage` changes, else
    every `every_s` seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = EVERY_S,
        *,
        rewrites: bool | None = None,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._every_s = every_s
        self._rewrites = stream.isatty() if rewrites is None else rewrites
        self._width = 0
        self._stage: str | None = None
        self._next = -math.inf

    def show(self, text: str, stage: str = "") -> None:
        now = self._clock()
        if self._rewrites:
            self._rewrite(text)
        elif stage != self._stage or now >= self._next:
            self._next = now + self._every_s
            self._write(text + "\n")
        self._stage = stage

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Takes the line away."""
        if self._rewrites and self._width:
            self._rewrite("")
            self._write("\r")

    def _rewrite(self, text: str) -> None:
        # A line that wraps could not be rewritten.
        text = text[: _columns(self._stream) - 1]
        self._write("\r" + text.ljust(self._width))
        self._width = len(text)

    def _write(self, text: str) -> None:
        # A closed stream, or one that has no flush, must not stop the work.
        with suppress(AttributeError, OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def _columns(stream: TextIO) -> int:
    """The width of the stream's terminal, which need not be stdout's; or COLUMNS."""
    if not os.environ.get("COLUMNS"):
        with suppress(AttributeError, OSError, ValueError):
            return os.get_terminal_size(stream.fileno()).columns or shutil.get_terminal_size()[0]
    return shutil.get_terminal_size().columns


class ProgressLine(StatusLine):
    """Shows each event of a search."""

    def __call__(self, progress: Progress) -> None:
        self.show(progress_text(progress), progress.stage)


@contextmanager
def waiting(stream: TextIO, what: str) -> Iterator[None]:
    """Shows what a command waits for, and for how long already, until the block ends."""
    line, done, start = StatusLine(stream, every_s=LONG_S), threading.Event(), time.monotonic()

    def tick() -> None:
        while True:
            line.show(f"{what}, {time.monotonic() - start:.0f} s")
            if done.wait(TICK_S):
                return

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        line.end()
