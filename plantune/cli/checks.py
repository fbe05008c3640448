"""What `plantune doctor` looks at: one function a check, none of which raises."""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from plantune.base.blobs import why_not_trusted
from plantune.base.paths import cache_folder, can_write, database_path, is_passing
from plantune.devices.host import cxx_compiler

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
    """Every check that needs no GPU, what plantune cannot run without first."""
    yield _python()
    yield _torch()
    yield _of_torch("oneDNN", _onednn)
    yield _compiler()
    yield _cache()
    yield _database(place or database_path())
    yield _of_torch("threads", _threads)
    for package, extra in OPTIONAL.items():
        yield package_check(package, extra)


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


def _of_torch(name: str, check: Callable[[], Check]) -> Check:
    """What a check finds that imports torch."""
    try:
        return check()
    except (ImportError, OSError):
        return Check(name, MISSING, "torch is not installed")


def _onednn() -> Check:
    import torch

    if not torch.backends.mkldnn.is_available():
        how = "install another torch wheel; without it oneDNN's kernels are left out"
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
    if is_passing(folder) or not can_write(folder):
        how = "set PLANTUNE_CACHE_DIR to a folder that you may write"
        return Check("cache folder", LIMITED, f"{wanted} is not writable; nothing new is kept", how)
    foreign = [why_not_trusted(folder / kind) for kind in ("cpu", "cuda", "cudnn")]
    if any(foreign):
        how = "set PLANTUNE_CACHE_DIR to a folder of your own"
        why = "; ".join(filter(None, foreign))
        return Check("cache folder", LIMITED, f"compiled kernels are not kept: {why}", how)
    return Check("cache folder", OK, str(folder))


def _database(path: Path) -> Check:
    from plantune.errors import DatabaseWarning, PlantuneError
    from plantune.plans.database.mounts import network_file_system
    from plantune.plans.database.plan_database import PlanDatabase

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
    if faults or is_passing(path.parent) or not can_write(path.parent):
        how = "give another path by --db, or set PLANTUNE_CACHE_DIR"
        return Check("plan database", LIMITED, (*faults, f"{path}: is not kept")[0], how)
    return Check("plan database", OK, str(path))


def _threads() -> Check:
    import torch

    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    how = "" if threads == cores else "plans are for this number: see OMP_NUM_THREADS"
    return Check("threads", OK, f"{threads} of {cores} cores", how)


def package_check(name: str, how: str) -> Check:
    try:
        return Check(name, OK, version(name))
    except PackageNotFoundError:
        return Check(name, LIMITED, "is not installed", how)
