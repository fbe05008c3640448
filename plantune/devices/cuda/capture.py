"""Captures work as a CUDA graph, and restores torch's state if that fails."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from plantune.devices.cuda.recording import Recording, recorded

# torch captures one graph at a time in a process, and a thread that waits for the GPU breaks
# another thread's capture: who warms up or synchronizes before a capture holds this throughout.
one_capture = threading.RLock()
# Private, but what torch's own captures end with.
_end_allocation = getattr(torch._C, "_cuda_endAllocateToPool", lambda index, pool: None)
_release_pool = getattr(torch._C, "_cuda_releasePool", lambda index, pool: None)


def capture(
    graph: torch.cuda.CUDAGraph,
    run: Callable[[], object],
    side: torch.cuda.Stream,
    device: torch.device,
    pool: Any,
) -> Recording:
    """Puts what `run` does on the stream `side` into a graph; returns the launches of our own
    kernels in it.

    Raises what that raises. Then too, torch is as it was before.
    """
    current = torch.cuda.current_stream(device)
    with torch.cuda.device(device):
        try:
            with one_capture, no_collection(), torch.cuda.stream(side):
                return _captured(graph, run, device, pool)
        except BaseException:
            _recover(current, side, device, pool)
            raise


def _captured(
    graph: torch.cuda.CUDAGraph, run: Callable[[], object], device: torch.device, pool: Any
) -> Recording:
    # torch ends the process if a capture finds no room for the state of random numbers.
    # This raises instead, and leaves the room. torch.cuda.graph would give it back, and would
    # collect garbage, 0.1 s each time.
    torch.empty(1 << 14, dtype=torch.uint8, device=device)
    # Other threads may go on calling CUDA while this one captures.
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        with recorded() as launches:
            run()
    except BaseException:
        with suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()
    return launches


def _recover(
    current: torch.cuda.Stream, side: torch.cuda.Stream, device: torch.device, pool: Any
) -> None:
    """After a failed capture torch is still on its stream, allocates for it, keeps that memory,
    and draws no random numbers outside of it. A capture that succeeds clears the last of these.
    """
    torch.cuda.set_stream(current)
    try:
        _end_allocation(device.index, pool)
        _release_pool(device.index, pool)
    except RuntimeError:
        return  # It had not begun, or it ended.
    # On the side: next to the spare tensor that capture has room for its random numbers.
    torch.cuda.set_stream(side)
    with suppress(RuntimeError), one_capture:
        spare = torch.zeros(1, device=device)
        with torch.cuda.graph(
            torch.cuda.CUDAGraph(), stream=side, capture_error_mode="thread_local"
        ):
            spare.add_(1)
    torch.cuda.set_stream(current)


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector would break a capture if it frees what is on a GPU, and would run
    inside of some samples of a timing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
