"""Memory of cuBLAS that captured graphs can rely on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# By device and stream; never given back, as cuBLAS's workspaces of these streams are not.
_pools: dict[tuple[int, int], torch.cuda.MemPool] = {}


@contextmanager
def kept_workspaces() -> Iterator[None]:
    """What cuBLAS takes inside for the current stream will never be anybody else's.

    torch keeps workspaces for each stream, and captured products go on writing to them. But others
    give them back: torch.compile, when it records graphs, those of the whole process; torch 2.12,
    when a graph ends, those of its stream. Later replays wrote to other tensors then (H200, torch
    2.11, 2026-11-20). In a pool of its own the memory stays mapped, and nobody allocates there.
    """
    if torch.cuda.is_current_stream_capturing():
        yield
        return
    stream = torch.cuda.current_stream()
    place = stream.device_index, stream.cuda_stream
    if place not in _pools:
        _pools.setdefault(place, torch.cuda.MemPool())
    with torch.cuda.use_mem_pool(_pools[place]):
        yield
