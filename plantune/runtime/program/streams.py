"""Streams that only plantune uses: no other work goes there, and libraries' state is not shared."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from plantune.devices.cuda.capture import one_capture
from plantune.devices.cuda.driver import make_stream

# Beside passes whose blocks fill the GPU one kernel after the other, an all-reduce of 18 MB began
# 0.4 ms after it could, when these were over (H200, 2026-11-23).
PRIORITIES = {"collectives": -1}
# Those whose owner is gone, by device and use: they serve the next one.
_spare: dict[tuple[int, str], list[torch.cuda.Stream]] = {}


def stream_for(owner: object, device: torch.device, use: str = "passes") -> torch.cuda.Stream:
    """A stream that no other program has while `owner` lives. One for another `use` is another one:
    where no product runs, cuBLAS needs no workspace.

    For each stream cuBLAS keeps a workspace of 32 MiB, to which graphs write that were captured
    there. Of torch's 32 streams each program took another, and none gave it back: 64 MiB for each
    module that was trained and dropped (H200, torch 2.11, 2026-11-20); two programs on the same
    one would write to one workspace at once.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = _spare_one((index, use), device)
    if stream is None:
        stream = torch.cuda.ExternalStream(make_stream(PRIORITIES.get(use, 0)), device)
    spare = _spare.setdefault((index, use), [])
    # A collector may run this anywhere; append is atomic.
    weakref.finalize(owner, spare.append, stream).atexit = False
    return stream


def _spare_one(key: tuple[int, str], device: torch.device) -> torch.cuda.Stream | None:
    """None if there is none, or while another thread captures: graphs of the last owner may still
    run, and to wait for the GPU would break that capture.
    """
    if not one_capture.acquire(blocking=False):
        return None
    try:
        stream = _spare[key].pop() if _spare.get(key) else None
        if stream is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)
        return stream
    finally:
        one_capture.release()


class Side:
    """Work on a stream of its own beside that of the caller, ordered by events.

    Captured, an event becomes an edge of the graph.
    """

    def __init__(self, device: torch.device, use: str = "passes") -> None:
        self._device = device
        self._stream = stream_for(self, device, use)
        self._forked, self._done = torch.cuda.Event(), torch.cuda.Event()

    def fork(self) -> None:
        """What is done inside starts when the current stream gets here."""
        self._forked.record(torch.cuda.current_stream(self._device))

    @contextmanager
    def inside(self) -> Iterator[int]:
        """Inside, work goes to that stream, whose handle this gives."""
        self._stream.wait_event(self._forked)
        with torch.cuda.stream(self._stream):
            yield self._stream.cuda_stream
        self._done.record(self._stream)

    def join(self) -> None:
        """The current stream waits for what was done inside."""
        torch.cuda.current_stream(self._device).wait_event(self._done)
