"""Networks share a GPU: what computes there has it alone, and the others prepare theirs meanwhile.

Compilers run on the other cores, so that the host's part of a call takes what it does in quiet.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = Path(tempfile.gettempdir()) / "plantune-census-gpu.lock"
# For who has the GPU, where there are many.
CORES, MANY = 3, 8


def prepare_elsewhere() -> None:
    """This thread, and what it starts, leaves the last cores to who has the GPU."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= MANY:
        os.sched_setaffinity(0, cores[:-CORES])


@contextmanager
def alone_on_gpu() -> Iterator[None]:
    """Waits until no other process of this machine is inside."""
    before = os.sched_getaffinity(0)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        every = range(os.cpu_count() or 1)
        os.sched_setaffinity(0, every[-CORES:] if len(every) >= MANY else before)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)
