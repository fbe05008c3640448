"""Networks share a GPU: what is timed has it alone, others prepare theirs beside each other.

Compilers run on other cores, so that the host's part of a call takes what it does in quiet.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

FOLDER = Path(tempfile.gettempdir())
# For what is timed, where there are many.
CORES, MANY = 3, 8
# Those that the census may use: others may be somebody else's.
OWN = sorted(os.sched_getaffinity(0))


def prepare_elsewhere() -> None:
    """This thread, and what it starts, leaves the last cores to what is timed."""
    if len(OWN) >= MANY:
        os.sched_setaffinity(0, OWN[:-CORES])


@contextmanager
def beside_others() -> Iterator[None]:
    """Waits until nothing is timed, or waits for that; others may be inside, too."""
    with _file("gpu") as gpu:
        with _file("timed") as timed:
            fcntl.flock(timed, fcntl.LOCK_EX)
            fcntl.flock(gpu, fcntl.LOCK_SH)
        yield


@contextmanager
def alone_on_gpu() -> Iterator[None]:
    """Waits until no other process of this machine is inside, or beside others."""
    before = os.sched_getaffinity(0)
    with _file("timed") as timed, _file("gpu") as gpu:
        fcntl.flock(timed, fcntl.LOCK_SH)
        fcntl.flock(gpu, fcntl.LOCK_EX)
        os.sched_setaffinity(0, OWN[-CORES:] if len(OWN) >= MANY else before)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def _file(name: str) -> TextIO:
    """A file to lock; the lock ends when it is closed."""
    return (FOLDER / f"plantune-census-{name}.lock").open("w")
