"""The few calls of NVIDIA's management library, by ctypes. Not every driver comes with it."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

# nvml.h
RELEASE_BYTES = 80
INSUFFICIENT_SIZE, NOT_SUPPORTED = 7, 3
SM_CLOCK = 1
HEAT_OR_POWER_SUPPLY = 0x08 | 0x20 | 0x40 | 0x80


def driver_release() -> str | None:
    """The driver's own version, such as 580.95.05; None if the library cannot tell."""
    library = _library()
    text = ctypes.create_string_buffer(RELEASE_BYTES)
    if library is None or library.nvmlSystemGetDriverVersion(text, RELEASE_BYTES):
        return None
    return text.value.decode(errors="replace")


def is_slowed(index: int) -> bool:
    """Whether heat or power supply slow torch's GPU of that number down now;
    False if the library cannot tell.

    A power cap set by software does not count: many GPUs run large work at their cap all the time.
    """
    name = "nvmlDeviceGetCurrentClocksThrottleReasons"
    reasons = _read(index, name, ctypes.c_ulonglong())
    return bool((reasons or 0) & HEAT_OR_POWER_SUPPLY)


def sm_clock_mhz(index: int) -> int | None:
    """The clock of the multiprocessors of torch's GPU of that number now; None if unknown."""
    return _read(index, "nvmlDeviceGetClockInfo", ctypes.c_uint(), SM_CLOCK)


def _read(index: int, name: str, result: Any, *arguments: Any) -> int | None:
    """What a call says of a GPU; None if the library is missing or the call fails."""
    handle = _handle(index)
    if handle is None or getattr(_library(), name)(handle, *arguments, ctypes.byref(result)):
        return None
    return int(result.value)


def users(index: int) -> int:
    """How many other processes compute on torch's GPU of that number; 0 if unknown."""
    handle, count = _handle(index), ctypes.c_uint(0)
    # Without room for rows only their number comes back. This process is one of them.
    if handle is None or _running(handle, count, None) not in (0, INSUFFICIENT_SIZE):
        return 0
    rows = (_Process * (count.value + 1))()
    count.value = len(rows)
    if _running(handle, count, rows):
        return 0
    return sum(row.pid != os.getpid() for row in rows[: count.value])


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t"""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def _running(handle: Any, count: ctypes.c_uint, rows: Any) -> int:
    try:
        call = _library().nvmlDeviceGetComputeRunningProcesses_v3
    except AttributeError:  # a driver from before 2021
        return NOT_SUPPORTED
    return int(call(handle, ctypes.byref(count), rows))


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
