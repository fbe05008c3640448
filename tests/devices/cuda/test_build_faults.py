"""Compilations that nobody waits for any more, and caches that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from plantune.base import blobs
from plantune.devices.cuda import compiler, toolchain
from plantune.devices.cuda.build import compile_cuda
from plantune.space.arch import load_arch

SOURCE = 'extern "C" __global__ void run(float* y) { y[threadIdx.x] = 1.f; }\n'
SM90 = load_arch("sm90")
# Each instance makes two of the next depth, and none is made twice.
ENDLESS = """
template <int depth, long place> struct Sum {
  static constexpr long value = Sum<depth - 1, 2 * place>::value
                              + Sum<depth - 1, 2 * place + 1>::value;
};
template <long place> struct Sum<0, place> { static constexpr long value = place; };
extern "C" __global__ void run(long* y) { *y = Sum<40, 0>::value; }
"""
PARENT = f"""
from plantune.devices.cuda.build import compile_cuda
from plantune.devices.cuda.choice import nvrtc_for
from plantune.space.arch import load_arch
nvrtc_for(load_arch("sm90"))  # its probe is another compilation
print("compiling", flush=True)
compile_cuda('''{ENDLESS}''', load_arch("sm90"))
"""


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path))


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_a_compilation_dies_with_the_process_that_asked_for_it(
    eventually: Callable[..., list[int]], is_gone: Callable[[int], bool]
) -> None:
    """After kill -9 nobody is left to limit its time."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (child,) = eventually(lambda: children_of(parent.pid), "nothing is compiled")
        time.sleep(0.5)
        assert not is_gone(child)
        parent.kill()
        eventually(lambda: is_gone(child), "it goes on compiling")


def test_a_compilation_that_is_late_for_its_parent_does_nothing() -> None:
    """The parent that asked was gone before the child could ask to die with it."""
    request = '{"parent": 1, "memory_bytes": 1}'
    command = [sys.executable, "-I", "-S", compiler.child.__file__]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is gone" in done.stderr


@pytest.mark.parametrize("fault", ["a file in its place", "a full disk", "no right"])
def test_a_cache_that_cannot_be_written_costs_time_alone(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is there all the same, and nothing is left of the attempt."""
    if fault == "a file in its place":
        (tmp_path / "cuda").write_text("")
    else:
        code = 28 if fault == "a full disk" else 13

        def fail(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(blobs.os, "replace", fail)
    first, second = compile_cuda(SOURCE, SM90), compile_cuda(SOURCE, SM90)
    assert first.image.startswith(b"\x7fELF")
    assert first.key == second.key
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] in ([], ["cuda"])


def test_the_headers_of_another_cutlass_are_other_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = toolchain.headers_digest.__wrapped__()
    monkeypatch.setattr(toolchain, "_cutlass_digest", lambda: "another release's")
    assert toolchain.headers_digest.__wrapped__() != before


RECORD = """cutlass_library/source/include/cutlass/gemm.h,sha256={},10
cutlass_library/generator.py,sha256={},9
"""


def test_the_record_of_the_wheel_tells_its_headers_apart(monkeypatch):
    def digest(*hashes: str) -> str:
        wheel = SimpleNamespace(read_text={"RECORD": RECORD.format(*hashes)}.__getitem__)
        monkeypatch.setattr(toolchain, "distribution", lambda name: wheel)
        return toolchain._cutlass_digest()

    assert digest("aa", "bb") == digest("aa", "cc") != digest("dd", "bb")


def test_without_a_record_the_folder_of_the_headers_counts(monkeypatch):
    wheel = SimpleNamespace(read_text=lambda name: None)
    monkeypatch.setattr(toolchain, "distribution", lambda name: wheel)
    assert toolchain._cutlass_digest() == str(toolchain.cutlass_include())
