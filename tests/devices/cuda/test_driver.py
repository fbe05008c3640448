"""A driver that is absent, or older than what plantune calls, is an error with a remedy."""

from __future__ import annotations

import ctypes

import pytest

from plantune.devices.cuda import driver
from plantune.devices.cuda.tensor_map import tensor_map
from plantune.errors import CudaError


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> object:
    class Old:
        """Knows how to start, and little else."""

        def cuInit(self, flags: int) -> int:
            return 0

    monkeypatch.setattr(driver, "_cuda", Old)
    return Old


@pytest.mark.usefixtures("library")
def test_a_function_that_the_driver_does_not_have_is_named() -> None:
    with pytest.raises(CudaError, match="no cuTensorMapEncodeTiled: it is too old; install"):
        tensor_map("float16", 0, (64, 64), (128,), (64, 64))


def test_an_absent_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    driver._cuda.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(CudaError, match=r"no CUDA driver was found \(libcuda.*install NVIDIA's"):
        driver.driver_version()
