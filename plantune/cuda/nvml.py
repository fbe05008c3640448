"""The few calls of NVIDIA's management library, by ctypes. It comes with most drivers, not all."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

# nvml.h
RELEASE_BYTES = 80
SM_CLOCK = 1
HEAT_OR_POWER_SUPPLY = 0x08 | 0x20 | 0x40 | 0x80


def driver_release() -> str | None:
    """The driver's own version, such as 580.95.05; None where the library cannot tell."""
    library = _library()
    text = ctypes.create_string_buffer(RELEASE_BYTES)
    if library is None or library.nvmlSystemGetDriverVersion(text, RELEASE_BYTES):
        return None
    return text.value.decode(errors="replace")


def is_slowed(index: int) -> bool:
    """Whether hardware or software slow torch's GPU of that number down now, for its heat or its
    power supply; False where the library cannot tell.

    A power cap that software set is how large work runs on many GPUs all the time: no disturbance.
    """
    handle = _handle(index)
    if handle is None:
        return False
    reasons = ctypes.c_ulonglong()
    failed = _library().nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons))
    return not failed and bool(reasons.value & HEAT_OR_POWER_SUPPLY)


def sm_clock_mhz(index: int) -> int | None:
    """The clock of the multiprocessors of torch's GPU of that number now; None where unknown."""
    handle = _handle(index)
    if handle is None:
        return None
    clock = ctypes.c_uint()
    failed = _library().nvmlDeviceGetClockInfo(handle, SM_CLOCK, ctypes.byref(clock))
    return None if failed else clock.value


@cache
def _library() -> Any:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):
        return None


@cache
def _handle(index: int) -> ctypes.c_void_p | None:
    import torch

    library, handle = _library(), ctypes.c_void_p()
    if library is None:
        return None
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    failed = library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle))
    return None if failed else handle
