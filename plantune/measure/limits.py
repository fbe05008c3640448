"""Limits of a worker process: its memory, its parent's life, and the terminal's Ctrl-C."""

from __future__ import annotations

import ctypes
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from plantune.base.outcome import Rejected
from plantune.devices.device import Device, first_line, is_out_of_memory
from plantune.errors import (
    BuildError,
    CannotJudge,
    CaptureError,
    CudaError,
    PlantuneError,
    WrongResult,
)

T = TypeVar("T")
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
# Faults of a kernel, reported by a later call; the GPU's context is lost after them.
GPU_FAULTS = (torch.AcceleratorError, CudaError, CaptureError)
REASON_LENGTH = 4000


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends, whatever runs here."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def leave_interrupts_to_parent() -> None:
    """Ctrl-C reaches every process of a terminal; the parent decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave_no_core() -> None:
    """A crash is an outcome here; a core file for each would fill the disk."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@contextmanager
def memory_limit(allowed_bytes: int | None) -> Iterator[None]:
    """Allocations fail when this process, or a compiler that it starts, takes this much more.

    Counted is memory that can be written: torch maps gigabytes of code that cost nothing. None is
    no limit, for work on a GPU: there CUDA's own tables grow with what the GPU holds.
    """
    if allowed_bytes is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _data_bytes() + allowed_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    """The memory that RLIMIT_DATA counts, as it is now."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))


def rejection(error: Exception) -> Rejected | None:
    """What an error says of a candidate; None if the candidate is not to blame for it."""
    if isinstance(error, BuildError):
        return Rejected("build", error.what[:REASON_LENGTH])
    if isinstance(error, (CannotJudge, WrongResult)):
        return Rejected("numerics", str(error)[:REASON_LENGTH])
    if isinstance(error, GPU_FAULTS):
        return Rejected("crash", first_line(error)[:REASON_LENGTH])
    if isinstance(error, PlantuneError):
        return None
    if is_out_of_memory(error):
        return Rejected("memory", str(error)[:REASON_LENGTH] or "MemoryError")
    return None


def attempted(make: Callable[[], T], device: Device | None = None) -> T | Rejected:
    """What `make` gives, or what its failure says of a candidate. Raises what no candidate is to
    blame for, and anything if it left `device` broken.
    """
    try:
        return make()
    except Exception as error:
        rejected = rejection(error)
        if rejected is None or not (device is None or device.works()):
            raise
        return rejected
