"""A wheel carries the C++ kernels compiled: where it is installed nobody needs a compiler."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from plantune.devices.host import cxx_compiler

from ..conftest import ROOT, build_command, run

CAPABILITIES = {"any": "default", "avx2": "avx2", "avx512": "avx512"}
# What torch asks for before it uses an instruction set.
FLAGS = {"any": set(), "avx2": {"avx2", "fma"}, "avx512": {"avx512vl", "avx512bw", "avx512dq"}}
UNITS = ("direct_conv", "squeeze_excite", "winograd")
# Checks each step of the families against float64, from the carried library.
STEP = """
import itertools
import sys
from pathlib import Path
import plantune
from plantune.devices import host
from plantune.cli import checks
from plantune.graph.builder import GraphBuilder
from plantune.graph.step import make_step
from plantune.graph.types import TensorType
from plantune.kernels.cpu import cxx
from plantune.kernels.family import Candidate
from plantune.kernels.registry import why_not
from plantune.measure.numerics import check
from plantune.space.search_space import load_search_space
from plantune.base.canonical import Attrs

assert host.cxx_compiler() is None
for unit in ("direct_conv", "squeeze_excite", "winograd"):
    carried = cxx.carried_library(unit)
    assert carried.is_relative_to(Path(plantune.__file__).parent), carried
    print(carried.name)
space, same = load_search_space("cpu"), {"stride": (1, 1), "padding": (1, 1)}


def require_right(graph, family):
    step = make_step(graph, [node.name for node in graph.nodes])
    candidate = Candidate(family, Attrs({"layout": "nhwc"}))
    assert why_not(step, candidate, space) is None
    report = check(step, candidate, space, 0)
    assert report.error <= report.bound and report.deterministic


# One, two or four registers of 8 or 16 outputs.
for size, outputs in itertools.product(((4, 6), (2, 2)), (35, 48, 96, 128)):
    b = GraphBuilder()
    x = b.input("x", TensorType((5, 21, *size)))
    w = b.parameter("w", TensorType((outputs, 21, 3, 3)))
    (y,) = b.emit("conv2d", x, w, **same, dilation=(1, 1), groups=1)
    (y,) = b.emit("relu", y)
    for family in ("winograd", "direct_conv"):
        require_right(b.build((y,)), family)
    b = GraphBuilder()
    x = b.input("x", TensorType((2, 3, *size)))
    w = b.parameter("w", TensorType((outputs, 3, 3, 3)))
    require_right(b.build(b.emit("conv2d", x, w, **same, dilation=(1, 1), groups=1)), "patch_conv")
b = GraphBuilder()
x, w = b.input("x", TensorType((2, 21, 4, 6))), b.parameter("w", TensorType((35, 21, 1, 1)))
half = {"stride": (2, 2), "padding": (0, 0)}
(y,) = b.emit("avg_pool2d", x, kernel=(2, 2), **half, count_padding=True)
whole = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
require_right(b.build(b.emit("conv2d", y, w, **whole)), "pooled_conv")
b = GraphBuilder()
x = b.input("x", TensorType((2, 21, 4, 6)))
(y,) = b.emit("mean", x, dims=(2, 3), keepdim=False)
for name, sizes, op in (("v", (3, 21), "relu"), ("w", (21, 3), "sigmoid")):
    weight = b.parameter(name, TensorType(sizes))
    (y,) = b.emit("matmul", y, weight, transpose_a=False, transpose_b=True)
    (y,) = b.emit(op, y)
(y,) = b.emit("mul", x, b.emit("reshape", y, shape=(2, 21, 1, 1))[0])
require_right(b.build((y,)), "squeeze_excite")
print(checks._compiler())
"""


def flags_here() -> set[str]:
    """What this CPU says that it has."""
    return set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text().partition("flags")[2]))


def here(names: dict[str, object]) -> list[object]:
    """A parameter for each instruction set, skipped where this CPU lacks it."""
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                platform.machine() != "x86_64" or not FLAGS[name] <= flags_here(),
                reason=f"this CPU does not run {name}",
            ),
        )
        for name in names
    ]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, torch and nothing of the checkout."""
    if cxx_compiler() is None:
        pytest.skip("it compiles C++")
    folder = tmp_path_factory.mktemp("environment")
    assert run([sys.executable, "-m", "venv", "--without-pip", str(folder)]).returncode == 0
    (site,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    done = run([*pip, "--target", str(site), str(wheel)])
    assert done.returncode == 0, done.stderr
    others = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "torch-beside.pth").write_text(others + "\n")
    return folder / "bin" / "python"


def in_it(
    installed: Path, program: str, *arguments: str, **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program there; what is given is all of its environment."""
    quiet = ["-W", "ignore:Failed to initialize NumPy:UserWarning"]
    folder = installed.parent
    return run(
        [str(installed), *quiet, "-c", program, *arguments],
        cwd=folder,
        env={"PATH": str(folder), "PLANTUNE_CACHE_DIR": str(folder / "cache"), **more},
    )


@pytest.mark.parametrize("instructions", here(FLAGS))
def test_without_a_compiler_the_carried_library_computes(
    instructions: str, installed: Path
) -> None:
    done = in_it(installed, STEP, ATEN_CPU_CAPABILITY=CAPABILITIES[instructions])
    assert done.returncode == 0, done.stderr
    *carried, compiler = done.stdout.splitlines()
    assert carried == [f"{unit}.{instructions}.so" for unit in UNITS]
    assert "none was found" in compiler
    assert "apt install g++, or set CXX, for inductor, torch.compile" in compiler


@pytest.mark.slow
def test_a_search_there_is_faster_than_the_framework(installed: Path) -> None:
    """0.67 to 0.69 of TorchScript in a bare Debian (2 cores of a Zen 3, 2026-11-22)."""
    search = ("search", "--model", "se_resnet9_fixup", "--batch", "4", "--budget", "60", "--json")
    done = in_it(installed, "from plantune.cli import main; main()", *search)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["families"].get("winograd")
    assert data["evidence"]["ratio"] <= 0.9


@pytest.mark.skipif(cxx_compiler() is None, reason="it compiles C++")
def test_the_wheel_names_its_platform(wheel: Path) -> None:
    """By the oldest glibc that has all it asks for; only C's library is asked for anything."""
    assert re.fullmatch(
        rf"plantune-[\d.]+-py3-none-manylinux_2_\d+_{platform.machine()}\.whl", wheel.name
    )
    with zipfile.ZipFile(wheel) as archive:
        carried = {n.rpartition("/")[2] for n in archive.namelist() if "/compiled/" in n}
        info = next(n for n in archive.namelist() if n.endswith("/WHEEL"))
        assert "Root-Is-Purelib: false" in archive.read(info).decode()
    if platform.machine() == "x86_64":
        assert carried == {f"{unit}.{name}.so" for unit in UNITS for name in FLAGS}


@pytest.mark.parametrize(("option", "carries"), [("", None), ("PLANTUNE_WITHOUT_KERNELS", False)])
def test_a_wheel_without_kernels_is_never_an_accident(
    option: str, carries: bool | None, tmp_path: Path
) -> None:
    more = {option: "1"} if option else {}
    environment = {**os.environ, "CXX": "/no/such/compiler", **more}
    done = run(build_command(tmp_path), env=environment)
    if carries is None:
        assert done.returncode != 0
        assert "there is no g++ (apt install g++, or set CXX)" in done.stdout + done.stderr
        assert not list(tmp_path.glob("*.whl"))
        return
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")


def test_an_sdist_is_installed_without_a_compiler(tmp_path: Path) -> None:
    """As from an unpacked sdist: PKG-INFO tells it from a checkout."""
    unpacked = tmp_path / "sdist"
    unpacked.mkdir()
    for name in ("plantune", "csrc", "plans", "search_spaces", "tools"):
        shutil.copytree(ROOT / name, unpacked / name)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, unpacked / name)
    (unpacked / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: plantune\nVersion: 0.1.0\n")
    command = build_command(tmp_path / "out")
    command[-1] = str(unpacked)
    done = run(command, env={**os.environ, "CXX": "/no/such/compiler"})
    assert done.returncode == 0, done.stderr
    assert [path.suffixes for path in (tmp_path / "out").glob("*-any.whl")]
