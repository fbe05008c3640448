"""What the parts of a training call take, by marks between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from plantune.devices.device import Device
from plantune.measure.racing.latency import CYCLES_PER_US, LEAST_WAIT_US

# Called at the start, and at the end of each part with its name.
Mark = Callable[[str], None]
START = "start"
REPEATS, WARM_UP = 15, 2


def unmarked(name: str) -> None:
    """For a call whose parts are not recorded."""


def parts_us(call: Callable[[Mark], object], device: Device) -> dict[str, float]:
    """The median of each part: on a GPU of its own time, with the host far ahead."""
    took = _on_gpu if device.captures else _on_host
    for _ in range(WARM_UP):
        call(unmarked)
    runs = [took(call, device) for _ in range(REPEATS)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _on_host(call: Callable[[Mark], object], device: Device) -> dict[str, float]:
    marks: list[tuple[str, float]] = []
    call(lambda name: marks.append((name, time.perf_counter_ns() / 1e3)))
    return _between(marks)


def _on_gpu(call: Callable[[Mark], object], device: Device) -> dict[str, float]:
    """The GPU waits until all is queued, which took as long as the call before."""
    device.synchronize()
    began = time.perf_counter_ns()
    call(unmarked)
    host_us = (time.perf_counter_ns() - began) / 1e3
    device.synchronize()
    events: list[tuple[str, torch.cuda.Event]] = []

    def mark(name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events.append((name, event))

    torch.cuda._sleep(int((2 * host_us + LEAST_WAIT_US) * CYCLES_PER_US))
    call(mark)
    device.synchronize()
    first = events[0][1]
    return _between([(name, 1e3 * first.elapsed_time(event)) for name, event in events])


def _between(marks: Sequence[tuple[str, float]]) -> dict[str, float]:
    """By name; micro-batches have each part several times."""
    found: dict[str, float] = {}
    for (_, begin), (name, end) in pairwise(marks):
        found[name] = found.get(name, 0.0) + end - begin
    return found
