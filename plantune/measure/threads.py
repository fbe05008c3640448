"""How many threads torch uses for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, torch's work on a CPU is done by so many threads.

    All of a proof but the kernel itself is done by one: it is many small parallel regions, and at
    the end of each, threads wait for each other. On two cores that others kept busy a proof took
    twenty times as long with two threads as with one (2026-11-22).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
