"""How many threads torch uses for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch's work on a CPU is done by the calling thread.

    References and comparisons are many small parallel regions; at the end of each, threads wait for
    each other: on two cores that others kept busy a proof took twenty times as long with two
    threads as with one (2026-11-22).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
