"""The clocks for work on a GPU, and whether it was throttled during the work."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from plantune.cuda.nvml import is_slowed, sm_clock_mhz, users
from plantune.device import Device
from plantune.errors import UnsupportedDevice
from plantune.gpus import device_for
from plantune.measure.cold import ColdWatch
from plantune.measure.timing import HOST, Call, Sample, Watch
from plantune.space.arch import load_arch

# Long beside the start and the end of a batch, some 10 us for waiting until the GPU is idle.
LEAST_BATCH_S = 2e-3


class CallWatch(Watch):
    """The host's clock for calls that only start work, such as a module's. It notes at which clock
    the GPU ran at the end of each sample.
    """

    least_batch_s = LEAST_BATCH_S

    def __init__(self, device: Device) -> None:
        self._device = device
        self.clocks_mhz: list[int] = []

    def batch_us(self, call: Call, count: int) -> float:
        repeats = range(count)
        self._device.synchronize()
        start = time.perf_counter_ns()
        for _ in repeats:
            call()
        self._device.synchronize()
        return (time.perf_counter_ns() - start) / count / 1e3

    def sample(self, call: Call, count: int) -> Sample:
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

    def batch_us(self, call: Call, count: int) -> float:
        self._start.record()
        for _ in range(count):
            call()
        self._end.record()
        self._end.synchronize()
        time_ms: float = self._start.elapsed_time(self._end)
        return time_ms * 1e3 / count

    def sample(self, call: Call, count: int) -> Sample:
        time_us = self.batch_us(call, count)
        return Sample(time_us, float(is_slowed(self._device.place.index)))


def gpu_watcher(arch: str) -> Callable[[], str]:
    """Says what slows the GPU of an arch down, "" where nothing does or it is a CPU.

    Of other processes it tells only those that ran before this one's workers.
    """
    try:
        device = device_for(load_arch(arch))
    except UnsupportedDevice:
        return str
    if not device.captures:
        return str
    index, before = device.place.index, users(device.place.index)

    def look() -> str:
        said = [f"{before} other processes used the GPU"] if before else []
        return "; ".join([*said, *(["heat or power slowed the GPU"] if is_slowed(index) else [])])

    return look


def call_watch(device: Device) -> Watch:
    """The clock for calls as a user makes them."""
    return CallWatch(device) if device.captures else HOST


def kernel_watch(device: Device) -> Watch:
    """The clock for single kernels."""
    return KernelWatch(device) if device.captures else ColdWatch()
