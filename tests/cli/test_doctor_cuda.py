"""What plans for a GPU need, and how doctor names what is missing or does not match."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from plantune.cli import cuda_checks
from plantune.cli.checks import LIMITED, OK
from plantune.cli.cuda_checks import judged_driver
from plantune.devices import gpus as gpus_module
from plantune.devices.cuda import build, choice, toolchain
from plantune.devices.cuda.compiler import Compiled, run_nvrtc
from plantune.devices.cuda.toolchain import Nvrtc
from plantune.devices.gpus import LocalGpu
from plantune.kernels.cuda.cuda_family import CudaFamily
from plantune.kernels.registry import family_named
from plantune.measure import kernel_samples as samples
from plantune.space.search_space import load_search_space

from .conftest import Run, object_of

# One of them is broken.
TWO = ("se_tail", "pointwise")


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
    assert "install NVIDIA's driver" in found["CUDA driver"]["how"]


def test_an_nvrtc_of_another_release_than_torchs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(toolchain, "all_nvrtc", lambda: (nvrtc(12, 9),))
    found = cuda_checks._nvrtc()
    assert found.status == LIMITED
    assert found.detail == "12.9, which does not match: this torch is for CUDA 13.0"
    assert found.how == "pip install 'cuda-toolkit[cccl,crt,cudart,nvrtc]==13.0.*'"
    monkeypatch.setattr(toolchain, "all_nvrtc", lambda: (nvrtc(13, 1), nvrtc(12, 9)))
    assert cuda_checks._nvrtc().status == OK


@pytest.mark.parametrize("cuda", [None, "", "odd"])
def test_a_torch_for_cpus_asks_for_no_release(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(toolchain, "all_nvrtc", lambda: (nvrtc(12, 9),))
    assert cuda_checks._nvrtc().status == OK


def test_absent_headers_of_cutlass_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "cutlass_include", lambda: None)
    found = cuda_checks._cutlass()
    assert found.status == LIMITED
    assert "pip install nvidia-cutlass" in found.how


def test_a_gpu_that_cannot_be_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    found = cuda_checks._gpus()
    assert found.status == LIMITED
    assert "No CUDA GPUs are available" in found.detail


def broken_without(header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the compiler finds a header no longer."""

    def refuse(nvrtc: Nvrtc, source: str, *rest: object) -> Compiled:
        if header in source:
            log = f'kernel.cu(1): catastrophic error: cannot open source file "{header}"'
            return Compiled(None, log)
        return run_nvrtc(nvrtc, source, *rest)  # type: ignore[arg-type]

    for module in (build, choice):
        monkeypatch.setattr(module, "run_nvrtc", refuse)
    choice._fault.cache_clear()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache in which nothing was compiled."""
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "fresh"))
    yield
    choice._fault.cache_clear()


def test_one_kernel_of_each_family_is_compiled() -> None:
    found = cuda_checks.families_check("sm90")
    families = [
        name
        for name in load_search_space("sm90").families
        if isinstance(family_named(name), CudaFamily)
    ]
    assert (found.status, found.how) == (OK, "")
    assert found.detail == f"one of each of {len(families)} families compiles"


@pytest.mark.usefixtures("fresh")
def test_a_family_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_without("cuda/se_tail.h", monkeypatch)
    some = [(s, c) for s, c in samples.samples(load_search_space("sm75")) if c.family in TWO]
    monkeypatch.setattr(samples, "samples", lambda space: some)
    found = cuda_checks.families_check("sm75")
    assert found.status == LIMITED
    assert found.detail == "se_tail of 2 families do not compile; they are left out"
    assert "sm75: cannot open source file" in found.how
    assert "its log is in" in found.how


@pytest.mark.usefixtures("fresh")
def test_headers_that_are_missing_come_with_the_line_that_installs_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not "ok" where nothing compiles, as torch's wheel leaves it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    broken_without("cuda/std/cstdint", monkeypatch)
    found = {check["name"]: check for check in object_of(run("doctor", "--json"))["checks"]}
    for name in ("CUDA kernels", "kernels for sm90"):
        assert found[name]["status"] == LIMITED
        assert 'cannot open source file "cuda/std/cstdint"' in found[name]["how"]
        assert "pip install 'cuda-toolkit[cccl,crt,cudart,nvrtc]==13.0.*'" in found[name]["how"]


@pytest.mark.parametrize(
    ("asked", "here", "compiled"),
    [
        ("cpu", (), ("sm90",)),
        ("sm80", (), ("sm80",)),
        ("cpu", ((8, 0), (9, 0), (9, 0), (6, 0)), ("sm80", "sm90")),
    ],
)
def test_kernels_are_compiled_for_what_is_here_or_asked_for(
    asked: str, here: tuple[tuple[int, int], ...], compiled: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [LocalGpu(i, "a GPU", capability, 1 << 30) for i, capability in enumerate(here)]
    monkeypatch.setattr(gpus_module, "gpus_here", lambda: gpus)
    assert cuda_checks._archs(asked) == compiled
