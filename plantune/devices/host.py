"""The CPU of this machine and its C++ compiler."""

from __future__ import annotations

import os
import platform
import shutil
from functools import cache
from pathlib import Path

NO_COMPILER = "no C++ compiler was found; apt install g++, or set CXX"


def cxx_compiler() -> str | None:
    """The path of the C++ compiler: that of CXX, else the first known one on the PATH."""
    asked = os.environ.get("CXX"), os.environ.get("PATH")
    if asked not in _compilers:  # it is asked several times for each step of a graph
        names = ["g++", "clang++"] if asked[0] is None else [asked[0]]
        _compilers[asked] = next((path for name in names if (path := shutil.which(name))), None)
    return _compilers[asked]


_compilers: dict[tuple[str | None, str | None], str | None] = {}


def give_way() -> None:
    """This thread, and the compilers that it starts, leave the cores to what somebody waits for."""
    os.nice(10)


def process_fields(pid: int) -> list[str]:
    """What /proc/PID/stat says of a process after its name, the state first; nothing of one that is
    gone.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


@cache
def cpu_identity() -> str:
    """What decides which instructions this CPU runs: compiled kernels are kept apart by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {flags}"


def cpu_name() -> str:
    """What the CPU's maker calls it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
