"""What is asked of NVIDIA's management library, with one that only answers, and without one."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plantune.devices.cuda import nvml

UUID = "1b2c3d4e-0000-1111-2222-333344445555"
PROC = Path("/proc/driver/nvidia/version")


def _unknown(*_: object) -> int:
    return nvml.NOT_SUPPORTED


class Library:
    """Answers as one with a single GPU would."""

    def __init__(self) -> None:
        self.reasons = 0
        self.refuses = ""
        self.nvmlDeviceGetComputeRunningProcesses_v3: Any = _unknown

    def nvmlInit_v2(self) -> int:
        return int(self.refuses == "nvmlInit_v2")

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"580.95.05"
        return int(self.refuses == "nvmlSystemGetDriverVersion")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return int(uuid != f"GPU-{UUID}".encode())

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, reasons: Any) -> int:
        reasons._obj.value = self.reasons
        return int(self.refuses == "nvmlDeviceGetCurrentClocksThrottleReasons")

    def nvmlDeviceGetClockInfo(self, handle: Any, clock: int, mhz: Any) -> int:
        mhz._obj.value = {1: 1980}[clock]
        return int(self.refuses == "nvmlDeviceGetClockInfo")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    for kept in (nvml._library, nvml._handle):
        kept.cache_clear()
    yield
    for kept in (nvml._library, nvml._handle):
        kept.cache_clear()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=UUID)
    )
    return made


def test_the_drivers_own_version(library: Library) -> None:
    assert nvml.driver_release() == "580.95.05"


@pytest.mark.parametrize("reasons", [0x08, 0x20, 0x40, 0x80, 0x84])
def test_heat_and_power_supply_slow_it_down(library: Library, reasons: int) -> None:
    library.reasons = reasons
    assert nvml.is_slowed(0)


@pytest.mark.parametrize("reasons", [0, 0x01, 0x02, 0x04])
def test_being_idle_or_capped_by_software_does_not_count(library: Library, reasons: int) -> None:
    library.reasons = reasons
    assert not nvml.is_slowed(0)


@pytest.mark.parametrize(
    "function",
    [
        "nvmlInit_v2",
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ],
)
def test_what_it_refuses_is_not_known(library: Library, function: str) -> None:
    library.refuses, library.reasons = function, 0x08
    if function != "nvmlDeviceGetCurrentClocksThrottleReasons":
        assert nvml.driver_release() is None
    if function != "nvmlSystemGetDriverVersion":
        assert not nvml.is_slowed(0)


def test_the_clock_of_the_multiprocessors(library: Library) -> None:
    assert nvml.sm_clock_mhz(0) == 1980
    library.refuses = "nvmlDeviceGetClockInfo"
    assert nvml.sm_clock_mhz(0) is None


def test_a_gpu_that_it_does_not_know(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.reasons = 0x08
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="another")
    )
    assert not nvml.is_slowed(0)


def test_without_it_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert nvml.driver_release() is None
    assert nvml.sm_clock_mhz(0) is None
    assert not nvml.is_slowed(0)


@pytest.mark.gpu
def test_the_drivers_version_is_the_kernels() -> None:
    if not PROC.is_file():
        pytest.skip("the kernel does not say which driver it has")
    said = re.search(r"(\d+\.\d+(?:\.\d+)?)", PROC.read_text(encoding="utf-8"))
    assert said is not None
    assert nvml.driver_release() == said[1]


def test_others_that_compute_there_are_counted(library: Library) -> None:
    pids = [os.getpid(), 17, 18]

    def running(handle: Any, count: Any, rows: Any) -> int:
        room, count._obj.value = count._obj.value, len(pids)
        for row, pid in zip(rows or (), pids, strict=False):
            row.pid = pid
        return nvml.INSUFFICIENT_SIZE if room < len(pids) else 0

    assert nvml.users(0) == 0  # an old driver
    library.nvmlDeviceGetComputeRunningProcesses_v3 = running
    assert nvml.users(0) == 2
    pids.clear()
    assert nvml.users(0) == 0
