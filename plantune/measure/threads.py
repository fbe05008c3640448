"""How many threads torch uses for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from plantune.graph.step import Step

# Steps with more arithmetic, or that move more, have large parallel regions.
SMALL_FLOPS, SMALL_BYTES = 10**8, 1 << 26


def threads_of_proof(step: Step) -> int:
    """How many threads do all of a proof but run the kernel itself.

    For a small step it is many small parallel regions, and at the end of each, threads wait for
    each other. On two cores that others kept busy a proof took twenty times as long with two
    threads as with one (2026-11-22). References of the 20 steps of se_resnet9_fixup with 8 images
    take 3.0 s instead of 3.9 with the limit at 1e8 FLOPs instead of 1e9, and beside two processes
    that never wait 9.4 instead of 5.3 (2 cores of an EPYC, 2026-11-28).
    """
    small = step.flops < SMALL_FLOPS and step.traffic_bytes < SMALL_BYTES
    return 1 if small else torch.get_num_threads()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, torch's work on a CPU is done by so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
