"""What `plantune doctor` looks at: one function a check, none of which raises."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from plantune.blobs import why_not_trusted
from plantune.cli.lookup import is_passing
from plantune.cuda.nvml import driver_release
from plantune.env import cache_folder, cxx_compiler, database_path
from plantune.report.tables import bytes_text
from plantune.space.arch import ARCH_NAMES, Version

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
        return Check("C++ compiler", LIMITED, "none was found", _what_a_compiler_brings())
    return Check("C++ compiler", OK, path)


def no_compiler_line(arch: str) -> str | None:
    """What is left out of a search because there is no C++ compiler, in one line, or None."""
    if arch != "cpu" or cxx_compiler() is not None:
        return None
    return f"no C++ compiler was found: {_what_a_compiler_brings()}"


def _what_a_compiler_brings() -> str:
    named = "torch.compile"
    with suppress(ImportError, OSError):  # without a torch
        from plantune.kernels.registry import need_a_compiler
        from plantune.space.arch import load_arch

        named = ", ".join((*need_a_compiler(load_arch("cpu")), named))
    return f"apt install g++, or set CXX, for {named}, which are left out"


def _cache() -> Check:
    folder = cache_folder()
    wanted = os.environ.get("PLANTUNE_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    if is_passing(folder):
        how = "set PLANTUNE_CACHE_DIR to a folder that you may write"
        return Check("cache folder", LIMITED, f"{wanted} cannot be written; nothing is kept", how)
    foreign = [why_not_trusted(folder / kind) for kind in ("cpu", "cuda", "cudnn")]
    if any(foreign):
        how = "set PLANTUNE_CACHE_DIR to a folder of your own"
        told = "; ".join(filter(None, foreign))
        return Check("cache folder", LIMITED, f"compiled kernels are not kept: {told}", how)
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
    """What plans for a GPU need, each with what is missing; the CPU needs none of it."""
    yield _driver()
    yield _gpus()
    yield _nvrtc()
    yield _cutlass()
    yield _kernels()
    yield _package("nvidia-cudnn-frontend", "pip install nvidia-cudnn-frontend")


def _driver() -> Check:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        how = "install NVIDIA's driver, if this machine has such a GPU"
        return Check("CUDA driver", LIMITED, "absent: libcuda.so.1 does not load", how)
    number = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    known = number.value // 1000, number.value % 1000 // 10
    return judged_driver(known, _cuda_of_torch(), driver_release())


def judged_driver(known: Version, wanted: Version | None, release: str | None = None) -> Check:
    """Whether a driver that knows one CUDA release runs a torch that was built for another."""
    told = " ".join(filter(None, (release, "for CUDA {}.{}".format(*known))))
    if wanted is not None and known[0] < wanted[0]:
        needs = "{}.{}".format(*wanted)
        how = f"install a newer driver, or a torch for CUDA {known[0]}"
        return Check("CUDA driver", LIMITED, f"{told}, too old: this torch needs {needs}", how)
    return Check("CUDA driver", OK, told)


def _cuda_of_torch() -> Version | None:
    """The CUDA release of torch, None of one for CPUs only."""
    try:
        import torch
    except (ImportError, OSError):
        return None
    major, _, minor = (torch.version.cuda or "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _gpus() -> Check:
    try:
        from plantune.device import gpus_here

        found = gpus_here()
    except (ImportError, OSError, RuntimeError) as error:
        return Check("CUDA GPU", LIMITED, f"cannot be asked: {error}", TORCH_HOW)
    if not found:
        how = "a GPU, its driver and a CUDA wheel of torch; the CPU needs none of them"
        return Check("CUDA GPU", LIMITED, "absent: torch sees none", how)
    told = ", ".join(f"{gpu}, {bytes_text(gpu.memory_bytes)}" for gpu in found)
    unknown = [str(gpu) for gpu in found if gpu.arch not in ARCH_NAMES]
    if unknown:
        how = f"plantune knows {', '.join(ARCH_NAMES)}; the others run through the framework"
        return Check("CUDA GPU", LIMITED, told, how)
    return Check("CUDA GPU", OK, told)


def _nvrtc() -> Check:
    from plantune.cuda.toolchain import all_nvrtc

    found = [nvrtc.version for nvrtc in all_nvrtc()]
    if not found:
        how = "comes with CUDA wheels of torch: pip install nvidia-cuda-nvrtc"
        return Check("NVRTC", LIMITED, "absent: no libnvrtc with CUDA's headers was found", how)
    told, wanted = ", ".join(map("{0[0]}.{0[1]}".format, found)), _cuda_of_torch()
    if wanted is not None and wanted[0] not in (version[0] for version in found):
        how = f"install the nvidia-cuda-nvrtc of CUDA {wanted[0]}"
        needs = f"this torch is for CUDA {wanted[0]}.{wanted[1]}"
        return Check("NVRTC", LIMITED, f"{told}, which does not match: {needs}", how)
    return Check("NVRTC", OK, told)


def _cutlass() -> Check:
    from plantune.cuda.toolchain import cutlass_include, cutlass_version

    place = cutlass_include()
    if place is None:
        how = "pip install nvidia-cutlass; the families that are made of it are left out"
        return Check("CUTLASS", LIMITED, "absent: its headers were not found", how)
    return Check("CUTLASS", OK, f"{cutlass_version()} in {place}")


def _kernels() -> Check:
    """For which GPUs kernels can be compiled here, and why not for the others."""
    from plantune.cuda.toolchain import nvrtc_for
    from plantune.errors import BuildError
    from plantune.space.arch import load_arch

    built, reasons = [], {}
    for name in ARCH_NAMES[1:]:
        try:
            nvrtc_for(load_arch(name))
            built.append(name)
        except BuildError as error:
            reasons[name] = str(error)
    if not built:
        return Check("CUDA kernels", LIMITED, "can be compiled for no GPU", "see NVRTC")
    told = f"can be compiled for {', '.join(built)}"
    how = "; ".join(reasons.values())
    return Check("CUDA kernels", LIMITED if reasons else OK, told, how)
