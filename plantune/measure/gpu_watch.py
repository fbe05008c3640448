"""The clocks for work on a GPU, and whether it was throttled meanwhile."""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import Any

import torch

from plantune.device import Device
from plantune.measure.timing import HOST, Call, Sample, Watch

# Long beside the start and the end of a batch, some 10 us for waiting until the GPU is idle.
LEAST_BATCH_S = 2e-3
# nvml.h: hardware and software slowdown by heat, by power supply. A power cap that software set
# is how large work runs on many GPUs all the time; it disturbs nothing.
SLOWED = 0x08 | 0x20 | 0x40 | 0x80


class CallWatch(Watch):
    """The host's clock for calls that only start work, such as a module's."""

    least_batch_s = LEAST_BATCH_S

    def __init__(self, device: Device) -> None:
        self._device = device

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
        return Sample(sample.us, 1.0) if is_throttled(self._device.place.index) else sample


class KernelWatch(CallWatch):
    """The GPU's own clock, for replays of graphs: what the host does meanwhile matters little."""

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
        return Sample(time_us, float(is_throttled(self._device.place.index)))


def call_watch(device: Device) -> Watch:
    """The clock for calls as a user makes them."""
    return CallWatch(device) if device.captures else HOST


def kernel_watch(device: Device) -> Watch:
    """The clock for single kernels."""
    return KernelWatch(device) if device.captures else HOST


def is_throttled(index: int) -> bool:
    """Whether heat or power slow the GPU down now; False where NVIDIA's library cannot tell."""
    asked = _nvml(index)
    if asked is None:
        return False
    library, handle = asked
    reasons = ctypes.c_ulonglong()
    failed = library.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons))
    return not failed and bool(reasons.value & SLOWED)


@cache
def _nvml(index: int) -> tuple[Any, ctypes.c_void_p] | None:
    """NVIDIA's management library with its handle of torch's GPU number `index`."""
    handle = ctypes.c_void_p()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
            return None
    except (OSError, AttributeError):
        return None
    return library, handle
