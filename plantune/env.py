"""What plantune reads from its surroundings, each on request: its own files, the compiler."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path

from plantune.errors import PlantuneError

NO_COMPILER = "no C++ compiler was found; apt install g++, or set CXX"
PACKAGE_FOLDER = Path(__file__).resolve().parent


def data_folder(name: str) -> Path:
    """The folder of plantune's own files called `name`, such as "search_spaces".

    An installed wheel carries it inside the package, a checkout has it beside the package.
    """
    places = (PACKAGE_FOLDER / "_data" / name, PACKAGE_FOLDER.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise PlantuneError(
        f"plantune's own folder {name!r} is neither {places[0]} nor {places[1]}: "
        "this installation is incomplete, install plantune again"
    )


def cxx_compiler() -> str | None:
    """The path of the C++ compiler: that of CXX, else the first known one on the PATH."""
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def extra_families() -> tuple[str, ...]:
    """Modules with kernel families of the user's own: PLANTUNE_FAMILIES=module:module."""
    return tuple(filter(None, os.environ.get("PLANTUNE_FAMILIES", "").split(":")))


def is_disabled() -> bool:
    """Whether PLANTUNE_DISABLE asks for the framework everywhere."""
    return _is_on("PLANTUNE_DISABLE")


def is_logging() -> bool:
    """Whether PLANTUNE_LOG asks for a line where calls begin to run in another way."""
    return _is_on("PLANTUNE_LOG")


def _is_on(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def cache_folder() -> Path:
    """Where plantune keeps what it can make again: PLANTUNE_CACHE_DIR, else the user's cache.

    Where neither can be written, a folder of this process that goes with it.
    """
    named = os.environ.get("PLANTUNE_CACHE_DIR")
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(named) if named else Path(user) / "plantune"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _folder_of_process()


def database_path() -> Path:
    """The user's plan database."""
    return cache_folder() / "plans.db"


@cache
def _folder_of_process() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="plantune-")
    warnings.warn(
        f"no cache folder can be written; kernels are kept in {folder.name} until the process ends",
        stacklevel=3,
    )
    _kept.append(folder)
    return Path(folder.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


@cache
def cpu_identity() -> str:
    """What decides which instructions this CPU runs: compiled kernels are kept apart by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {flags}"
