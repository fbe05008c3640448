"""Memory of cuBLAS that captured graphs can rely on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# By device and stream; never given back, as cuBLAS's workspaces of these streams are not.
_kept: dict[tuple[int, int], torch.cuda.MemPool] = {}
# torch refuses two threads that allocate in one MemPool.
_one_thread = threading.Lock()


@contextmanager
def kept_workspaces() -> Iterator[None]:
    """What cuBLAS takes inside for the current stream will never be anybody else's.

    torch keeps workspaces for each stream, and captured products go on writing to them. But others
    give them back: torch.compile, when it records graphs, those of the whole process; torch 2.12,
    when a graph is destroyed, those of its stream. Later replays wrote to other tensors then (H200,
    torch 2.11, 2026-11-20). In memory of its own it stays mapped, and only products of that
    stream come back to it. Other allocators than torch's own have none: nothing is kept there.
    """
    if torch.cuda.is_current_stream_capturing() or torch.cuda.get_allocator_backend() != "native":
        yield
        return
    stream = torch.cuda.current_stream()
    with _one_thread, torch.cuda.use_mem_pool(_memory_of(stream.device_index, stream.cuda_stream)):
        yield


def _memory_of(device: int, stream: int) -> torch.cuda.MemPool:
    if (device, stream) not in _kept:
        _kept[device, stream] = torch.cuda.MemPool()
    return _kept[device, stream]
