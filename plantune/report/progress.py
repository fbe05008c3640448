"""The progress of a search on stderr: one line that changes on a terminal, else a few lines."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from plantune.report.tables import ms_text

if TYPE_CHECKING:
    from plantune.search.progress import Progress

EVERY_S = 5.0


def progress_text(progress: Progress) -> str:
    """Phase, counts, the best so far against the framework op by op, and the time that is left."""
    parts = [f"{progress.phase}: {progress.measured} measured, {progress.rejected} rejected"]
    if math.isfinite(progress.best_us) and progress.framework_us > 0:
        ratio = progress.best_us / progress.framework_us
        best, framework = progress.best_us / 1e3, progress.framework_us / 1e3
        parts.append(f"best about {ms_text(best)}, framework {ms_text(framework)} ({ratio:.2f})")
    parts.append(f"{progress.seconds_left:.0f} s left")
    return ", ".join(parts) + (f" - {progress.detail}" if progress.detail else "")


class ProgressLine:
    """Call it with each event; `end` before anything else is written to the stream."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._rewrites = stream.isatty()
        self._width = 0
        self._phase = ""
        self._next = -math.inf

    def __call__(self, progress: Progress) -> None:
        now = self._clock()
        if self._rewrites:
            self._rewrite(progress_text(progress))
        elif progress.phase != self._phase or now >= self._next:
            self._next = now + EVERY_S
            self._write(progress_text(progress) + "\n")
        self._phase = progress.phase

    def end(self) -> None:
        """Takes the line away."""
        if self._rewrites and self._width:
            self._rewrite("")
            self._write("\r")

    def _rewrite(self, text: str) -> None:
        # A line that wraps could not be rewritten.
        text = text[: shutil.get_terminal_size().columns - 1]
        self._write("\r" + text.ljust(self._width))
        self._width = len(text)

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it; the search matters more
            self._stream.write(text)
            self._stream.flush()
