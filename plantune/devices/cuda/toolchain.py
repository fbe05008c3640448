"""The NVRTC libraries and headers that are here, and which of them serves an arch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TypeVar

from plantune.base.paths import data_folder
from plantune.space.arch import Arch, Version

# Where the wheels of CUDA 13 and of CUDA 12 keep NVRTC and the headers that kernels include.
WHEELS = (
    ("cu13/lib", ("cu13/include", "cu13/include/cccl")),
    (
        "cuda_nvrtc/lib",
        ("cuda_runtime/include", "cuda_nvcc/include", "cuda_cccl/include", "cuda_crt/include"),
    ),
)
CUDA_HEADERS = (
    *("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp"),
    *("crt/host_defines.h", "cuda/std/__cccl/version.h"),
)
# plantune's extras for torch's builds for CUDA 12, and all wheels of one such release.
EXTRAS = ("cu126", "cu128", "cu129")
CUDA_12_WHEELS = ("cccl", "nvcc", "nvrtc", "runtime")
T = TypeVar("T")


@dataclass(frozen=True)
class Nvrtc:
    """One NVRTC with the CUDA headers of its release."""

    library: Path
    version: Version
    includes: tuple[Path, ...]

    def __str__(self) -> str:
        return "NVRTC {}.{}".format(*self.version)


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Makes a value at the first call; threads that ask in the meantime wait for it.

    Kernels are built by many threads, each of which would read some thousand files.
    """
    made, lock = cache(make), threading.Lock()

    @wraps(make)
    def get() -> T:
        with lock:
            return made()

    return get


@once
def all_nvrtc() -> tuple[Nvrtc, ...]:
    """Every NVRTC that is here beside headers, the newest first, of equal ones torch's wheel's."""
    found = dict.fromkeys((*_in_wheels(), *_in_toolkits()))
    return tuple(sorted(found, key=lambda nvrtc: nvrtc.version, reverse=True))


def how_to_install(arch: Arch | None = None) -> str:
    """The pip line that brings what kernels are compiled with, of the release of this torch."""
    cuda = _cuda_of_torch()
    below = None if arch is None or arch.cuda is None else arch.cuda.nvrtc_below
    if below is not None and not (cuda and cuda.startswith("12.")):
        # Of no release of torch that knows the arch, so all of it has to come.
        wheels = " ".join(f"'nvidia-cuda-{part}-cu12==12.9.*'" for part in CUDA_12_WHEELS)
        return f"pip install {wheels}"
    if cuda is not None and cuda.startswith("12."):
        extra = "cu" + cuda.replace(".", "")
        if extra in EXTRAS:
            return f"pip install 'plantune[{extra}]'"
        return "pip install " + " ".join(
            f"'nvidia-cuda-{part}-cu12=={cuda}.*'" for part in ("cccl", "nvcc")
        )
    release = "13.*" if cuda is None else f"{cuda}.*"
    return f"pip install 'cuda-toolkit[cccl,crt,cudart,nvrtc]=={release}'"


def _cuda_of_torch() -> str | None:
    """The CUDA release that torch was built for, None if for CPUs only."""
    import torch

    return torch.version.cuda or None


def include_folders(nvrtc: Nvrtc) -> tuple[Path, ...]:
    """Where kernels find their headers: plantune's own, CUTLASS's if they are installed, CUDA's."""
    cutlass = cutlass_include()
    return (data_folder("csrc"), *((cutlass,) if cutlass else ()), *nvrtc.includes)


@cache
def release_digest(nvrtc: Nvrtc) -> str:
    """Tells apart what has one version number: patches of NVRTC, by its size, and of the CUDA
    headers, by those that kernels include first.
    """
    total = hashlib.sha256(f"{nvrtc} {nvrtc.library.stat().st_size}".encode())
    for path in (include / name for include in nvrtc.includes for name in CUDA_HEADERS):
        if path.is_file():
            total.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


@once
def cutlass_include() -> Path | None:
    """The folder of the CUTLASS headers, None if there is none."""
    spec = importlib.util.find_spec("cutlass_library")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / "source" / "include"
        if (folder / "cutlass" / "cutlass.h").is_file():
            return folder
    return None


@once
def headers_digest() -> str:
    """A digest of what kernels include, by contents: plantune's headers and CUTLASS's."""
    root = data_folder("csrc")
    total = hashlib.sha256(_cutlass_digest().encode())
    for path in sorted((root / "cuda").rglob("*.h*")):
        total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def cutlass_version() -> str:
    try:
        return version("nvidia-cutlass")
    except PackageNotFoundError:
        return "none"


def _cutlass_digest() -> str:
    """The wheel's own record of its headers' contents; reading all of them takes a second, and
    `metadata.files`, which asks for each whether it is there, 30 ms of a first call.
    """
    try:
        recorded = distribution("nvidia-cutlass").read_text("RECORD")
    except PackageNotFoundError:
        recorded = None
    if recorded is None:
        return str(cutlass_include())
    headers = sorted(line for line in recorded.splitlines() if "source/include/" in line)
    return hashlib.sha256("\n".join(headers).encode()).hexdigest()


def _in_wheels() -> Iterator[Nvrtc]:
    """Wheels may be spread over several folders of the module path."""
    roots = [Path(entry) / "nvidia" for entry in sys.path]
    for library, includes in WHEELS:
        folders = tuple(f for root in roots for name in includes if (f := root / name).is_dir())
        for root in roots:
            yield from _nvrtc_in(root / library, folders)


def _in_toolkits() -> Iterator[Nvrtc]:
    for name in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if name:
            include = Path(name) / "include"
            folders = tuple(f for f in (include, include / "cccl") if f.is_dir())
            yield from _nvrtc_in(Path(name) / "lib64", folders)


def _nvrtc_in(folder: Path, includes: tuple[Path, ...]) -> Iterator[Nvrtc]:
    """The library in a folder, if it loads and there are headers of its own CUDA beside it."""
    for path in sorted(folder.glob("libnvrtc.so.[0-9][0-9]")):
        found = _version_of(path)
        if found is None:
            continue
        own = tuple(place for place in includes if _cuda_major(place) in (None, found[0]))
        if any((include / "cuda_fp16.h").is_file() for include in own):
            yield Nvrtc(path, found, own)


def _cuda_major(include: Path) -> int | None:
    """The CUDA whose headers a folder holds, None if they do not say."""
    try:
        with open(include / "cuda_runtime_api.h", encoding="utf-8", errors="replace") as header:
            text = header.read(1 << 15)
    except OSError:
        return None
    found = re.search(r"^#define CUDART_VERSION +(\d+)", text, re.MULTILINE)
    return int(found[1]) // 1000 if found else None


def _version_of(path: Path) -> Version | None:
    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        library = ctypes.CDLL(str(path))
        failed = library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    except (OSError, AttributeError):
        return None
    return None if failed else (major.value, minor.value)
