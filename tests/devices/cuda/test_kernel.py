"""Kernels on the driver's side: what they ask for, shown with a driver that only writes down."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from plantune.devices.cuda import driver, kernel
from plantune.devices.cuda.build import Binary
from plantune.devices.cuda.kernel import Kernel

BINARY = Binary("key", b"", "")
STATIC_BYTES = 1024


class Driver:
    """Answers as a driver would; functions of one module and name are one."""

    def __init__(self) -> None:
        self.set: list[tuple[int, int, int]] = []
        self.launched: list[tuple[driver.Extent, list[Any]]] = []
        self.functions: dict[str, int] = {}

    def function_of(self, module: object, name: str) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.functions.setdefault(name, 100 + len(self.functions)))

    def attribute(self, function: ctypes.c_void_p, which: int) -> int:
        return STATIC_BYTES if which == driver.STATIC_SHARED_BYTES else 0

    def set_attribute(self, function: ctypes.c_void_p, which: int, value: int) -> None:
        self.set.append((function.value or 0, which, value))

    def launch(
        self, function: ctypes.c_void_p, stream: int, extent: driver.Extent, arguments: list[Any]
    ) -> None:
        self.launched.append((extent, arguments))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    for name in ("function_of", "attribute", "set_attribute", "launch"):
        monkeypatch.setattr(driver, name, getattr(made, name))
    monkeypatch.setattr(kernel, "_module", lambda binary: ctypes.c_void_p(1))
    monkeypatch.setattr(kernel, "_granted", {})
    return made


def launched(made: Kernel, shared_bytes: int, cluster: tuple[int, int, int] = (1, 1, 1)) -> None:
    made.launch(0, (1, 1, 1), 32, (), shared_bytes=shared_bytes, cluster=cluster)


def test_what_every_kernel_may_have_is_not_asked_for(fake: Driver) -> None:
    launched(Kernel(BINARY), (48 << 10) - STATIC_BYTES)
    assert fake.set == []


def test_declared_memory_counts(fake: Driver) -> None:
    launched(Kernel(BINARY), 48 << 10)
    assert fake.set == [(100, driver.DYNAMIC_SHARED_BYTES, 48 << 10)]


def test_an_instance_that_asks_for_less_takes_nothing_from_another(fake: Driver) -> None:
    large, small = Kernel(BINARY), Kernel(BINARY)
    for made, size in ((large, 200 << 10), (small, 100 << 10), (large, 200 << 10)):
        launched(made, size)
    assert fake.set == [(100, driver.DYNAMIC_SHARED_BYTES, 200 << 10)]


def test_kernels_of_other_names_ask_for_themselves(fake: Driver) -> None:
    for name in ("run", "reduce"):
        launched(Kernel(BINARY, name), 100 << 10)
    assert [function for function, _, _ in fake.set] == [100, 101]


def test_large_clusters_are_asked_for_once(fake: Driver) -> None:
    made = Kernel(BINARY)
    for size in (8, 16, 16):
        launched(made, 0, (size, 1, 1))
    assert fake.set == [(100, driver.NON_PORTABLE_CLUSTER, 1)]


def test_extent_and_arguments_reach_the_driver(fake: Driver) -> None:
    number = ctypes.c_int(7)
    Kernel(BINARY).launch(5, (2, 3, 4), 64, (number,), cluster=(2, 1, 1), programmatic=True)
    (extent, arguments) = fake.launched[0]
    assert extent == driver.Extent((2, 3, 4), 64, 0, (2, 1, 1), True)
    assert arguments == [number]


def test_blocks_that_wait_for_each_other_are_launched_at_once(fake: Driver) -> None:
    for cooperative in (False, True):
        launched(Kernel(BINARY, cooperative=cooperative), 0)
    assert [extent.cooperative for extent, _ in fake.launched] == [False, True]
