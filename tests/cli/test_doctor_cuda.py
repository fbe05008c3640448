"""F34: what plans for a GPU need, and how doctor names what is missing or does not match."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from plantune.cli import checks
from plantune.cli.checks import LIMITED, OK, judged_driver
from plantune.cuda import toolchain
from plantune.cuda.toolchain import Nvrtc

from .conftest import Run, object_of


def nvrtc(*version: int) -> Nvrtc:
    return Nvrtc(Path("/lib/libnvrtc.so"), version, ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("known", "wanted"),
    [((13, 0), (13, 0)), ((12, 2), (12, 8)), ((13, 1), (12, 8)), ((9, 0), None)],
)
def test_a_driver_of_the_same_release_serves(known: object, wanted: object) -> None:
    assert judged_driver(known, wanted).status == OK  # type: ignore[arg-type]


def test_a_driver_is_told_with_its_own_version() -> None:
    assert judged_driver((13, 0), None, "580.95.05").detail == "580.95.05 for CUDA 13.0"


def test_a_driver_that_is_too_old_is_named() -> None:
    found = judged_driver((12, 4), (13, 0))
    assert found.status == LIMITED
    assert found.detail == "for CUDA 12.4, too old: this torch needs 13.0"
    assert found.how == "install a newer driver, or a torch for CUDA 12"


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ctypes.CDLL

    def absent(name: str, *rest: object, **more: object) -> ctypes.CDLL:
        if name is not None and "libcuda" in str(name):
            raise OSError(f"{name}: cannot open shared object file")
        return load(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ctypes, "CDLL", absent)


@pytest.mark.usefixtures("no_driver")
def test_an_absent_driver_is_named(run: Run) -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0
    found = {check["name"]: check for check in object_of(result)["checks"]}
    assert found["CUDA driver"]["status"] == LIMITED
    assert "libcuda.so.1 does not load" in found["CUDA driver"]["detail"]
    assert "install NVIDIA's driver" in result.stderr


def test_an_nvrtc_of_another_release_than_torchs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(toolchain, "all_nvrtc", lambda: (nvrtc(12, 9),))
    found = checks._nvrtc()
    assert found.status == LIMITED
    assert found.detail == "12.9, which does not match: this torch is for CUDA 13.0"
    assert found.how == "install the nvidia-cuda-nvrtc of CUDA 13"
    monkeypatch.setattr(toolchain, "all_nvrtc", lambda: (nvrtc(13, 1), nvrtc(12, 9)))
    assert checks._nvrtc().status == OK


@pytest.mark.parametrize("cuda", [None, "", "odd"])
def test_a_torch_for_cpus_asks_for_no_release(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(toolchain, "all_nvrtc", lambda: (nvrtc(12, 9),))
    assert checks._nvrtc().status == OK


def test_absent_headers_of_cutlass_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "cutlass_include", lambda: None)
    found = checks._cutlass()
    assert found.status == LIMITED
    assert "pip install nvidia-cutlass" in found.how


def test_a_gpu_that_cannot_be_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    found = checks._gpus()
    assert found.status == LIMITED
    assert "No CUDA GPUs are available" in found.detail
