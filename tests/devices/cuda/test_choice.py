"""Which NVRTC compiles: the newest that is here with headers of its own CUDA, and that works."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from plantune.devices.cuda import choice, compiler, toolchain
from plantune.devices.cuda.build import compile_cuda
from plantune.devices.cuda.choice import nvrtc_for
from plantune.devices.cuda.compiler import Compiled
from plantune.devices.cuda.toolchain import Nvrtc, all_nvrtc, how_to_install
from plantune.errors import BuildError
from plantune.space.arch import load_arch

SM70, SM90 = load_arch("sm70"), load_arch("sm90")
SOURCE = 'extern "C" __global__ void run(float* y) { y[threadIdx.x] = 1.f; }\n'
Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "cache"))
    choice._fault.cache_clear()
    yield
    choice._fault.cache_clear()


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The NVRTCs that were tried."""
    tried: list[Path] = []

    def spy(nvrtc: Nvrtc, *rest: object) -> Compiled:
        tried.append(nvrtc.library)
        return compiler.run_nvrtc(nvrtc, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(choice, "run_nvrtc", spy)
    return tried


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """As if only these were here."""
    return lambda *these: monkeypatch.setattr(choice, "all_nvrtc", lambda: these)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Nvrtc, ...]]:
    """What is found in a folder of wheels and in a toolkit, and nowhere else."""

    def look(site: Path | None = None, toolkit: Path | None = None) -> tuple[Nvrtc, ...]:
        # Only here: what is looked for once in a process, as CUTLASS is, would be missed for good.
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(site)] if site else [])
            patch.setenv("CUDA_HOME", str(toolkit or "/no/such/folder"))
            patch.delenv("CUDA_PATH", raising=False)
            these = toolchain.all_nvrtc.__wrapped__()
        monkeypatch.setattr(choice, "all_nvrtc", lambda: these)
        return tuple(one for one in these if "/usr/local" not in str(one.library))

    return look


def nvrtc_of(major: int) -> Nvrtc:
    return next(one for one in all_nvrtc() if one.version[0] == major)


def linked(folder: Path, library: Path) -> None:
    """An NVRTC as a wheel has it: it finds its builtins beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in library.parent.glob("libnvrtc*"):
        (folder / part.name).symlink_to(part)


def headers(folder: Path, nvrtc: Nvrtc, *, without: tuple[str, ...] = ()) -> None:
    """The headers of a release in one folder, as a toolkit has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for include in nvrtc.includes:
        for entry in include.iterdir():
            if entry.name not in without and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)


@pytest.fixture
def wheels(tmp_path: Path) -> Make:
    """The wheels of CUDA 13, without some headers."""

    def make(*without: str) -> Path:
        nvrtc, site = nvrtc_of(13), tmp_path / "site"
        linked(site / "nvidia/cu13/lib", nvrtc.library)
        headers(site / "nvidia/cu13/include", nvrtc, without=without)
        return site

    return make


@pytest.fixture
def toolkit(tmp_path: Path) -> Make:
    """A whole toolkit, of one CUDA or with the headers of another."""

    def make(library: int = 13, include: int = 13) -> Path:
        place = tmp_path / f"cuda-{library}-{include}"
        linked(place / "lib64", nvrtc_of(library).library)
        headers(place / "include", nvrtc_of(include))
        return place

    return make


def test_volta_takes_an_older_nvrtc() -> None:
    assert nvrtc_for(SM70).version < (13, 0)


def test_the_newest_that_serves_an_arch_is_taken() -> None:
    assert nvrtc_for(SM90) == all_nvrtc()[0]


@pytest.mark.parametrize("missing", ["cuda", "crt"])
def test_a_wheel_without_headers_gives_way_to_a_toolkit(
    missing: str, wheels: Make, toolkit: Make, found: Callable[..., tuple[Nvrtc, ...]]
) -> None:
    """CCCL is in `cuda`. torch's wheel brings neither, and its NVRTC is of the same version."""
    site, whole = wheels(missing, "cccl"), toolkit()
    both = found(site, whole)
    assert len(both) == 2
    assert len({one.version for one in both}) == 1
    assert nvrtc_for(SM90).library.is_relative_to(whole)


def test_a_wheel_with_its_headers_comes_first(
    wheels: Make, toolkit: Make, found: Callable[..., tuple[Nvrtc, ...]]
) -> None:
    site = wheels()
    found(site, toolkit())
    assert nvrtc_for(SM90).library.is_relative_to(site)


def test_headers_of_another_cuda_are_not_taken(
    toolkit: Make, found: Callable[..., tuple[Nvrtc, ...]]
) -> None:
    assert found(None, toolkit(12, 13)) == ()
    assert [one.version[0] for one in found(None, toolkit(12, 12))] == [12]


def test_headers_of_cuda_13_beside_an_nvrtc_of_12_are_not_its(
    tmp_path: Path, wheels: Make, found: Callable[..., tuple[Nvrtc, ...]]
) -> None:
    """As in an environment with torch for CUDA 12, to which pip has added cuda-toolkit 13."""
    site = wheels()
    shutil.rmtree(site / "nvidia/cu13/lib")
    linked(site / "nvidia/cuda_nvrtc/lib", nvrtc_of(12).library)
    (runtime,) = (place for place in nvrtc_of(12).includes if place.parent.name == "cuda_runtime")
    (site / "nvidia/cuda_runtime").mkdir()
    (site / "nvidia/cuda_runtime/include").symlink_to(runtime)
    (here,) = found(site)
    assert here.version[0] == 12
    assert not [place for place in here.includes if "cu13" in str(place)]
    with pytest.raises(BuildError, match="cannot open source file"):
        nvrtc_for(SM90)


def test_what_is_missing_is_named(
    wheels: Make, found: Callable[..., tuple[Nvrtc, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found(wheels("cuda", "cccl"))
    with pytest.raises(BuildError) as caught:
        nvrtc_for(SM90)
    message = str(caught.value)
    assert 'cannot open source file "cuda/std/cstdint"' in message
    assert message.endswith("pip install 'cuda-toolkit[cccl,crt,cudart,nvrtc]==13.0.*'")


def test_what_cannot_serve_says_why(only: Callable[..., None]) -> None:
    only(nvrtc_of(13))
    with pytest.raises(BuildError, match=r"compiles for sm70: .*older than 13.0, got 13"):
        nvrtc_for(SM70)


def test_nothing_here(only: Callable[..., None]) -> None:
    only()
    with pytest.raises(BuildError, match=r"no NVRTC was found .*pip install"):
        nvrtc_for(SM90)


@pytest.mark.parametrize(
    ("cuda", "arch", "line"),
    [
        (None, SM90, "'cuda-toolkit[cccl,crt,cudart,nvrtc]==13.*'"),
        ("13.2", SM90, "'cuda-toolkit[cccl,crt,cudart,nvrtc]==13.2.*'"),
        ("12.8", SM90, "'plantune[cu128]'"),
        ("12.6", SM70, "'plantune[cu126]'"),
        ("12.4", SM90, "'nvidia-cuda-cccl-cu12==12.4.*' 'nvidia-cuda-nvcc-cu12==12.4.*'"),
        (
            "13.0",
            SM70,
            "'nvidia-cuda-cccl-cu12==12.9.*' 'nvidia-cuda-nvcc-cu12==12.9.*' "
            "'nvidia-cuda-nvrtc-cu12==12.9.*' 'nvidia-cuda-runtime-cu12==12.9.*'",
        ),
    ],
)
def test_the_line_is_for_this_torch(
    cuda: str | None, arch: object, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert how_to_install(arch) == f"pip install {line}"  # type: ignore[arg-type]


class TestProbe:
    def test_it_runs_once_on_a_machine(self, probes: list[Path]) -> None:
        first = nvrtc_for(SM90)
        choice._fault.cache_clear()
        assert nvrtc_for(SM90) == first
        assert probes == [first.library]

    def test_what_was_compiled_before_needs_none(self, probes: list[Path]) -> None:
        """The first output from a warm cache waits for no compiler."""
        first = compile_cuda(SOURCE, SM90)
        for kept in (Path(os.environ["PLANTUNE_CACHE_DIR"]) / "cuda").glob("*.probe"):
            kept.unlink()
        choice._fault.cache_clear()
        probes.clear()
        assert compile_cuda(SOURCE, SM90) == first
        assert probes == []

    def test_a_header_that_came_is_seen(
        self, wheels: Make, found: Callable[..., tuple[Nvrtc, ...]]
    ) -> None:
        """The next process looks again, because the folder holds something else."""
        site = wheels("crt")
        found(site)
        with pytest.raises(BuildError, match="crt/"):
            nvrtc_for(SM90)
        (crt,) = (p / "crt" for p in nvrtc_of(13).includes if (p / "crt").is_dir())
        (site / "nvidia/cu13/include/crt").symlink_to(crt)
        choice._fault.cache_clear()
        toolchain.release_digest.cache_clear()
        assert nvrtc_for(SM90).library.is_relative_to(site)

    def test_a_failure_that_may_pass_is_not_kept(
        self, only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        only(nvrtc_of(13))
        failed = Compiled(None, "kernel.cu(1): catastrophic error: out of memory")
        with monkeypatch.context() as patch:
            patch.setattr(choice, "run_nvrtc", lambda *_: failed)
            with pytest.raises(BuildError, match="out of memory"):
                nvrtc_for(SM90)
        choice._fault.cache_clear()
        assert nvrtc_for(SM90) == nvrtc_of(13)
