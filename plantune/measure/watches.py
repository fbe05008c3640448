"""The clocks: of the host, for single kernels of a CPU with caches as other kernels leave them, and
for work on a GPU, with what disturbed a sample.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from plantune.devices.cuda.nvml import is_slowed, sm_clock_mhz
from plantune.devices.device import Device, Runnable

# The clock takes some 0.05 us; a batch is so long that this is nothing.
LEAST_BATCH_S = 200e-6
# Long beside the start and the end of a batch, some 10 us for waiting until the GPU is idle.
LEAST_GPU_BATCH_S = 2e-3
# More than the caches that a core has for itself.
BYTES_PER_THREAD = 4 << 20
TASKS = "/proc/self/task"


@dataclass(frozen=True)
class Sample:
    """The time of one call in a batch, and for which part of the batch threads waited for a core.

    Threads wait at the same time, so it may be more than 1.
    """

    us: float
    waited: float


class Watch:
    """The clock for calls that are done when they return."""

    least_batch_s = LEAST_BATCH_S
    # In one batch.
    most_calls: ClassVar[float] = math.inf
    # The state in which calls find caches.
    cache: ClassVar[str] = "warm"
    clocks_mhz: Sequence[int] = ()

    def batch_us(self, call: Runnable, count: int) -> float:
        """The time of one call in a batch of `count`."""
        repeats = range(count)
        start = time.perf_counter_ns()
        for _ in repeats:
            call()
        return (time.perf_counter_ns() - start) / count / 1e3

    def sample(self, call: Runnable, count: int) -> Sample:
        """The time, and what disturbed it."""
        waited, start = waited_ns(), time.perf_counter_ns()
        time_us = self.batch_us(call, count)
        passed_us = (time.perf_counter_ns() - start) / 1e3
        waited_us = (waited_ns() - waited) / 1e3
        return Sample(time_us, waited_us / max(passed_us, 1e-3))


HOST = Watch()


class ColdWatch(Watch):
    """Between calls all threads write to memory that the call does not use.

    In a network a kernel's weights, inputs and code are not in a core's own caches any more. Timed
    in a row, the steps of a plan for 8 images summed up to 4.2 ms, and the whole took 6.7: small
    ops of the framework look 3 to 5 times as fast, a Winograd of 512 channels 1.6 times, so that
    what is fused or reads fewer weights loses (2 cores of a Xeon and of a Zen 3, 2026-11-22).
    """

    cache: ClassVar[str] = "cold"
    most_calls: ClassVar[float] = 4

    def __init__(self) -> None:
        self._others = torch.zeros(BYTES_PER_THREAD * torch.get_num_threads() // 4)

    def batch_us(self, call: Runnable, count: int) -> float:
        total_ns = 0
        for _ in range(count):
            self._others.add_(1.0)
            start = time.perf_counter_ns()
            call()
            total_ns += time.perf_counter_ns() - start
        return total_ns / count / 1e3


class CallWatch(Watch):
    """The host's clock for calls that only start work, such as a module's. It notes at which clock
    the GPU ran at the end of each sample.
    """

    least_batch_s = LEAST_GPU_BATCH_S

    def __init__(self, device: Device) -> None:
        self._device = device
        self.clocks_mhz: list[int] = []

    def batch_us(self, call: Runnable, count: int) -> float:
        repeats = range(count)
        self._device.synchronize()
        start = time.perf_counter_ns()
        for _ in repeats:
            call()
        self._device.synchronize()
        return (time.perf_counter_ns() - start) / count / 1e3

    def sample(self, call: Runnable, count: int) -> Sample:
        sample = super().sample(call, count)
        if (clock := sm_clock_mhz(self._device.place.index)) is not None:
            self.clocks_mhz.append(clock)
        return Sample(sample.us, 1.0) if is_slowed(self._device.place.index) else sample


class KernelWatch(CallWatch):
    """The GPU's own clock, for replays of graphs: the host matters little there."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def batch_us(self, call: Runnable, count: int) -> float:
        self._start.record()
        for _ in range(count):
            call()
        self._end.record()
        self._end.synchronize()
        time_ms: float = self._start.elapsed_time(self._end)
        return time_ms * 1e3 / count

    def sample(self, call: Runnable, count: int) -> Sample:
        time_us = self.batch_us(call, count)
        return Sample(time_us, float(is_slowed(self._device.place.index)))


def call_watch(device: Device) -> Watch:
    """The clock for calls as a user makes them."""
    return CallWatch(device) if device.captures else HOST


def kernel_watch(device: Device) -> Watch:
    """The clock for single kernels."""
    return KernelWatch(device) if device.captures else ColdWatch()


def waited_ns() -> int:
    """How long the threads of this process have waited for a core so far, as Linux counts it.

    0 if the kernel does not count it.
    """
    total = 0
    try:
        for task in os.listdir(TASKS):
            with open(f"{TASKS}/{task}/schedstat", "rb") as file:
                total += int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return total
    return total
