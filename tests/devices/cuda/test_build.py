"""CUDA binaries: compiled by NVRTC without a GPU, cached by content, with what they take."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from plantune.devices.cuda import build, compiler, toolchain
from plantune.devices.cuda.build import Usage, compile_cuda, usage_in
from plantune.devices.cuda.choice import nvrtc_for
from plantune.devices.cuda.compiler import Compiled
from plantune.devices.cuda.toolchain import Nvrtc
from plantune.errors import BuildError
from plantune.space.arch import ARCH_NAMES, load_arch

CUDA_ARCHS = [name for name in ARCH_NAMES if name != "cpu"]
SOURCE = """#include <cuda_fp16.h>
#include "cuda/launch.h"
extern "C" __global__ void __launch_bounds__(64) run(__half* y, int n) {
  __shared__ __half kept[32];
  plantune::wait_for_predecessor();
  kept[threadIdx.x % 32] = y[n];
  __syncthreads();
  y[threadIdx.x] = kept[n % 32];
}
"""
SM90 = load_arch("sm90")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that were really compiled."""
    seen: list[str] = []
    run = build.run_nvrtc

    def spy(nvrtc: Nvrtc, source: str, *rest: object) -> Compiled:
        seen.append(source)
        return run(nvrtc, source, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "run_nvrtc", spy)
    return seen


@pytest.mark.parametrize("arch", CUDA_ARCHS)
def test_every_arch_is_built_without_a_gpu(arch: str) -> None:
    binary = compile_cuda(SOURCE, load_arch(arch))
    assert binary.image.startswith(b"\x7fELF")
    usage = binary.usage["run"]
    assert 0 < usage.registers <= 255
    # Blackwell keeps a kilobyte of each block for itself.
    assert usage.shared_bytes in (64, 64 + 1024)
    assert (usage.stack_bytes, usage.spill_bytes) == (0, 0)


def test_ptx_runs_on_later_chips_too() -> None:
    binary = compile_cuda(SOURCE, load_arch("sm80"), kind="PTX")
    assert b".target sm_80" in binary.image
    assert binary.usage == {}


class TestCache:
    def test_a_source_is_compiled_once(self, compilations: list[str]) -> None:
        first, second = compile_cuda(SOURCE, SM90), compile_cuda(SOURCE, SM90)
        assert first == second
        assert len(compilations) == 1

    @pytest.mark.parametrize("what", ["source", "arch", "kind", "headers", "nvrtc", "patch"])
    def test_whatever_changes_a_binary_has_a_key_of_its_own(
        self, what: str, compilations: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = compile_cuda(SOURCE, SM90)
        if what == "headers":
            monkeypatch.setattr(build, "headers_digest", lambda: "other")
        if what == "patch":
            monkeypatch.setattr(build, "release_digest", lambda nvrtc: "other")
        if what == "nvrtc":
            other = Nvrtc(nvrtc_for(SM90).library, (13, 9), nvrtc_for(SM90).includes)
            monkeypatch.setattr(build, "nvrtc_for", lambda arch: other)
            monkeypatch.setattr(build, "fitting", lambda arch: (other,))
        source = SOURCE + "// other\n" if what == "source" else SOURCE
        arch = load_arch("sm80") if what == "arch" else SM90
        second = compile_cuda(source, arch, kind="PTX" if what == "kind" else "CUBIN")
        assert first.key != second.key
        assert len(compilations) == 2

    @pytest.mark.parametrize("what", ["library", "cuda_fp16.hpp", "cuda/std/__cccl/version.h"])
    def test_patches_of_one_release_are_told_apart(self, what: str, tmp_path: Path) -> None:
        """By contents, wherever they lie."""

        def digest(folder: str, changed: str = "") -> str:
            place = tmp_path / folder
            library, include = place / "libnvrtc.so.13", place / "include"
            for path in (library, include / "cuda_fp16.hpp", include / "cuda/std/__cccl/version.h"):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("as it was")
            if changed:
                (library if changed == "library" else include / changed).write_text("patched")
            return toolchain.release_digest(Nvrtc(library, (13, 0), (include,)))

        assert digest("here") == digest("there")
        assert digest("here") != digest("elsewhere", what)

    def test_headers_count_by_contents(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def digest(folder: str, text: str) -> str:
            header = tmp_path / folder / "cuda" / "a.h"
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text(text)
            monkeypatch.setattr(toolchain, "data_folder", lambda name: tmp_path / folder)
            return toolchain.headers_digest.__wrapped__()

        assert digest("here", "int a;") == digest("there", "int a;")
        assert digest("here", "int a;") != digest("here", "int b;")

    @pytest.mark.parametrize("place", [0, 40, -1])
    def test_tampered_bytes_are_compiled_again(
        self, place: int, compilations: list[str], tmp_path: Path
    ) -> None:
        binary = compile_cuda(SOURCE, SM90)
        (cached,) = tmp_path.glob("cuda/*.bin")
        content = bytearray(cached.read_bytes())
        content[place] ^= 1
        cached.write_bytes(content)
        assert compile_cuda(SOURCE, SM90).image == binary.image
        assert len(compilations) == 2
        assert compile_cuda(SOURCE, SM90).image == binary.image
        assert len(compilations) == 2

    def test_a_truncated_file_is_compiled_again(
        self, compilations: list[str], tmp_path: Path
    ) -> None:
        compile_cuda(SOURCE, SM90)
        (cached,) = tmp_path.glob("cuda/*.bin")
        cached.write_bytes(cached.read_bytes()[:20])
        compile_cuda(SOURCE, SM90)
        assert len(compilations) == 2

    @pytest.mark.parametrize("spoilt", ["a FIFO", "a link", "writable by others"])
    def test_what_another_may_have_made_is_compiled_again(
        self, spoilt: str, compilations: list[str], tmp_path: Path
    ) -> None:
        binary = compile_cuda(SOURCE, SM90)
        (cached,) = tmp_path.glob("cuda/*.bin")
        if spoilt == "writable by others":
            cached.chmod(0o666)
        else:
            kept = cached.rename(tmp_path / "kept")
            os.mkfifo(cached) if spoilt == "a FIFO" else cached.symlink_to(kept)
        assert [compile_cuda(SOURCE, SM90).image for _ in range(2)] == [binary.image] * 2
        assert len(compilations) == 2

    def test_a_binary_under_the_name_of_another_is_compiled_again(
        self, compilations: list[str], tmp_path: Path
    ) -> None:
        binary = compile_cuda(SOURCE, SM90)
        (cached,) = tmp_path.glob("cuda/*.bin")
        compile_cuda(SOURCE.replace("32", "16"), SM90)
        (other,) = set(tmp_path.glob("cuda/*.bin")) - {cached}
        other.replace(cached)
        assert compile_cuda(SOURCE, SM90).image == binary.image
        assert len(compilations) == 3


class TestFailures:
    def test_the_message_is_a_line_and_the_log_is_in_a_file(self, tmp_path: Path) -> None:
        source = "this is no CUDA\n"
        with pytest.raises(BuildError, match=r"did not compile a kernel for sm90: ") as caught:
            compile_cuda(source, SM90)
        assert "error" in caught.value.log
        assert "\n" not in str(caught.value)
        assert source.strip() not in str(caught.value)
        assert f"; its log is in {caught.value.path}, " in str(caught.value)
        kept = Path(str(caught.value.path))
        assert kept.is_relative_to(tmp_path)
        for part in (source, caught.value.log, "sm_90a"):
            assert part in kept.read_text()

    def test_nothing_is_cached(self, tmp_path: Path) -> None:
        with pytest.raises(BuildError):
            compile_cuda("#error no\n", SM90)
        assert not list(tmp_path.glob("cuda/*.bin"))

    def test_a_compiler_that_hangs_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvrtc_for(SM90)
        monkeypatch.setattr(compiler, "TIME_LIMIT_S", 0.01)
        with pytest.raises(BuildError, match=r"took over 0.01 s"):
            compile_cuda(SOURCE, SM90)

    def test_a_compiler_that_eats_memory_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvrtc_for(SM90)
        monkeypatch.setattr(compiler, "MEMORY_LIMIT_BYTES", 120 << 20)
        with pytest.raises(BuildError):
            compile_cuda(SOURCE, SM90)

    def test_a_compiler_that_dies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def died(*_: object, **__: object) -> subprocess.CompletedProcess[bytes]:
            return subprocess.CompletedProcess([], -11, b"", b"it said this")

        nvrtc_for(SM90)
        monkeypatch.setattr(subprocess, "run", died)
        with pytest.raises(BuildError, match=r"died \(-11\)") as caught:
            compile_cuda(SOURCE, SM90)
        assert caught.value.log == "it said this"


def test_the_assemblers_report_of_several_kernels() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'make_params' for 'sm_90a'
ptxas info    : Function properties for make_params
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
ptxas info    : Compiling entry function 'run' for 'sm_90a'
ptxas info    : Function properties for run
    24 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 1040 bytes smem
"""
    assert usage_in(log) == {
        "make_params": Usage(12, 0, 0, 0),
        "run": Usage(255, 1040, 24, 16),
    }
