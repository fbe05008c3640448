"""What pip installs beside torch's CUDA build is enough: every CUDA family compiles from it.

The environment holds the wheels with NVRTC and headers that torch's build names, and plantune's own
dependencies, nothing else of CUDA. torch itself, of whichever build, is the one of these tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from plantune.base.blobs import read_blob, write_blob

from ..kernels.representatives import sources

ROOT = Path(__file__).resolve().parents[2]
# The extras of cuda-toolkit with NVRTC and headers; others are gigabytes of libraries.
COMPILING = {"cudart", "nvrtc"}
ARCHS = ("sm90", "sm80")
UNREACHABLE = ("Max retries exceeded", "Read timed out", "No module named pip")
# What pip says in the end where it reached no index, or one without torch's CUDA build.
NOT_THERE = ("No matching distribution", "Could not find a version")

# What is imported comes from the tests' environment; what is looked for later is the folder's.
COMPILE = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from plantune.devices.cuda import choice, toolchain
from plantune.devices.cuda.build import compile_cuda
from plantune.space.arch import load_arch

sys.path[:] = [sys.argv[1], *(place for place in sys.path if "-packages" not in place)]
here = [one for one in toolchain.all_nvrtc() if str(one.library).startswith(sys.argv[1])]
choice.all_nvrtc = lambda: tuple(here)
wanted = json.load(sys.stdin)
with ThreadPoolExecutor(2) as threads:
    built = threads.map(lambda job: compile_cuda(job[2], load_arch(job[1])), wanted)
    sizes = {f"{family} {arch}": len(done.image) for (family, arch, _), done in zip(wanted, built)}
print(json.dumps({"nvrtc": list(map(str, here)), "sizes": sizes}))
"""


def pip(*arguments: str, without: tuple[str, ...] = UNREACHABLE) -> str:
    """What pip says; skips where it fails with one of these words, and says so."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", *arguments]
    quiet = {**os.environ, "PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet)
    if done.returncode and any(words in done.stderr for words in without):
        pytest.skip(f"no package index to install from: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def named_by_torch() -> Requirement:
    """cuda-toolkit as the CUDA build of this torch's release names it."""
    release = torch.__version__.split("+")[0]
    # Three equal signs: no build for CPUs is meant.
    asked = ["--dry-run", "--ignore-installed", "--no-deps", "--report", "-", f"torch==={release}"]
    (report,) = json.loads(pip(*asked, without=(*UNREACHABLE, *NOT_THERE)))["install"]
    for found in map(Requirement, report["metadata"]["requires_dist"]):
        if found.name == "cuda-toolkit":
            return found
    pytest.skip(f"torch {release} of this index is no build for CUDA 13")


def own_dependencies() -> list[str]:
    """plantune's, as far as they belong to CUDA."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [r for r in project["dependencies"] if r.startswith(("cuda-", "nvidia-"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with these wheels and nothing else."""
    folder, toolkit = tmp_path_factory.mktemp("site"), named_by_torch()
    extras = ",".join(sorted(COMPILING & toolkit.extras))
    own = own_dependencies()
    pip("--target", str(folder), f"cuda-toolkit[{extras}]{toolkit.specifier}", own[0])
    # Only its headers are used, so what it requires for Python is left out.
    pip("--target", str(folder), "--no-deps", *own[1:])
    return folder


@pytest.fixture
def cache(tmp_path: Path, binaries: Path) -> Iterator[Path]:
    """An empty cache. What was compiled into it serves test_every_arch.py, too, which builds the
    same sources: a binary's name is the digest of its compiler and headers as well.
    """
    folder = tmp_path / "cache"
    yield folder
    for path in (folder / "cuda").glob("*.bin"):
        if (content := read_blob(path)) is not None:
            write_blob(binaries / "cuda" / path.name, content)


@pytest.mark.slow
def test_every_family_compiles(site: Path, tmp_path: Path, cache: Path) -> None:
    quiet = "ignore:Failed to initialize NumPy:UserWarning"
    wanted = [(family, arch, source) for arch in ARCHS for family, source in sources(arch)]
    done = subprocess.run(
        [sys.executable, "-W", quiet, "-c", COMPILE, str(site)],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PLANTUNE_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["nvrtc"]) == 1
    assert set(found["sizes"]) == {f"{family} {arch}" for family, arch, _ in wanted}
    assert all(size > 1000 for size in found["sizes"].values()), found
    for family in ("implicit_gemm_conv", "pointwise", "pool", "linear", "se_tail"):
        assert {f"{family} {arch}" for arch in ARCHS} <= set(found["sizes"])
    assert "hopper_conv sm90" in found["sizes"]
