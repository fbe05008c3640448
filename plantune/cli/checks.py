"""What `plantune doctor` looks at: one function a check, none of which raises."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from plantune.cli.lookup import is_passing
from plantune.env import cache_folder, cxx_compiler, database_path

OK, LIMITED, MISSING = "ok", "limited", "missing"
PYTHON, TORCH = (3, 11), (2, 9)
TORCH_HOW = "pip install torch (https://pytorch.org/get-started has the wheels for each machine)"


@dataclass(frozen=True)
class Check:
    """`limited` means that plantune runs, but not with everything; `how` says what would help."""

    name: str
    status: str
    detail: str
    how: str = ""
    required: bool = False


def checks(place: Path | None) -> Iterator[Check]:
    """Every check, what plantune cannot run without first."""
    yield _python()
    yield _torch()
    yield _onednn()
    yield _compiler()
    yield _cache()
    yield _database(place or database_path())
    yield _threads()
    for package, extra in OPTIONAL.items():
        yield _package(package, extra)
    yield from cuda_checks()


OPTIONAL = {
    "click": "pip install plantune",
    "optuna": "pip install plantune",
    "sqlite-utils": "pip install plantune",
    "matplotlib": "for bench --plot: pip install 'plantune[plot]'",
}


def _python() -> Check:
    ok = sys.version_info[:2] >= PYTHON
    how = "" if ok else f"install Python {PYTHON[0]}.{PYTHON[1]} or newer"
    return Check("python", OK if ok else MISSING, platform.python_version(), how, required=True)


def _torch() -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", MISSING, str(error), TORCH_HOW, required=True)
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    ok = numbers >= TORCH
    how = "" if ok else f"torch {TORCH[0]}.{TORCH[1]} or newer is needed: {TORCH_HOW}"
    return Check("torch", OK if ok else MISSING, torch.__version__, how, required=True)


def _onednn() -> Check:
    try:
        import torch
    except (ImportError, OSError):
        return Check("oneDNN", MISSING, "there is no torch")
    if not torch.backends.mkldnn.is_available():
        how = "another torch wheel; the families of oneDNN are left out"
        return Check("oneDNN", LIMITED, "this torch was built without it", how)
    return Check("oneDNN", OK, f"in torch, for {torch.backends.cpu.get_cpu_capability()}")


def _compiler() -> Check:
    path = cxx_compiler()
    if path is None:
        how = "apt install g++, or set CXX; the families that compile are left out"
        return Check("C++ compiler", LIMITED, "none was found", how)
    return Check("C++ compiler", OK, path)


def _cache() -> Check:
    folder = cache_folder()
    wanted = os.environ.get("PLANTUNE_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    if is_passing(folder):
        how = "set PLANTUNE_CACHE_DIR to a folder that you may write"
        return Check("cache folder", LIMITED, f"{wanted} cannot be written; nothing is kept", how)
    return Check("cache folder", OK, str(folder))


def _database(path: Path) -> Check:
    from plantune.errors import DatabaseWarning, PlantuneError
    from plantune.plan_db import PlanDatabase
    from plantune.plan_db.mounts import network_file_system

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            PlanDatabase.open(path).close()
    except PlantuneError as error:
        return Check("plan database", MISSING, str(error), "give another path by --db")
    kind = network_file_system(path)
    if kind is not None:
        how = "set PLANTUNE_CACHE_DIR to a local folder: SQLite's locks may fail there"
        return Check("plan database", LIMITED, f"{path}: on a network file system ({kind})", how)
    faults = [str(item.message) for item in caught if item.category is DatabaseWarning]
    if faults or is_passing(path.parent):
        how = "give another path by --db, or set PLANTUNE_CACHE_DIR"
        return Check("plan database", LIMITED, (*faults, f"{path}: is not kept")[0], how)
    return Check("plan database", OK, str(path))


def _threads() -> Check:
    try:
        import torch
    except (ImportError, OSError):
        return Check("threads", MISSING, "there is no torch")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    how = "" if threads == cores else "plans are for this number: see OMP_NUM_THREADS"
    return Check("threads", OK, f"{threads} of {cores} cores", how)


def _package(name: str, how: str) -> Check:
    try:
        return Check(name, OK, version(name))
    except PackageNotFoundError:
        return Check(name, LIMITED, "is not installed", how)


def cuda_checks() -> Iterator[Check]:
    """GPU, driver and NVRTC, each with what is missing. This release uses none of them yet."""
    yield _driver()
    yield _gpus()
    yield _nvrtc()


def _driver() -> Check:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        how = "install NVIDIA's driver, if this machine has such a GPU"
        return Check("CUDA driver", LIMITED, "absent: libcuda.so.1 does not load", how)
    number = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    return Check("CUDA driver", OK, f"for CUDA {number.value // 1000}.{number.value % 1000 // 10}")


def _gpus() -> Check:
    try:
        from plantune.cli.lookup import gpus_here

        found = gpus_here()
    except (ImportError, OSError, RuntimeError) as error:
        return Check("CUDA GPU", LIMITED, f"cannot be asked: {error}", TORCH_HOW)
    if not found:
        how = "a GPU, its driver and a CUDA wheel of torch; the CPU needs none of them"
        return Check("CUDA GPU", LIMITED, "absent: torch sees none", how)
    return Check("CUDA GPU", OK, f"{', '.join(found)}; this release runs plans on the CPU only")


def _nvrtc() -> Check:
    places: tuple[Callable[[], str | None], ...] = (_nvrtc_of_wheels, _nvrtc_of_system)
    for place in places:
        found = place()
        if found is not None:
            return Check("NVRTC", OK, found)
    how = "comes with CUDA wheels of torch: pip install nvidia-cuda-nvrtc"
    return Check("NVRTC", LIMITED, "absent: no libnvrtc was found", how)


def _nvrtc_of_wheels() -> str | None:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    found = [path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*")]
    return str(sorted(found)[0]) if found else None


def _nvrtc_of_system() -> str | None:
    from ctypes.util import find_library

    return find_library("nvrtc")
