"""Loads C++ for this CPU: carried by the wheel, or compiled here and cached by content.

A unit is a source `csrc/cpu/NAME.cpp`. A wheel carries each one once for every instruction set that
`tools/build_wheel.py` lists.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from plantune.base.blobs import read_blob, write_blob
from plantune.base.build_log import build_error
from plantune.base.paths import PACKAGE_FOLDER, cache_file, data_folder
from plantune.devices.host import NO_COMPILER, cpu_identity, cxx_compiler
from plantune.errors import BuildError
from plantune.kernels.family import Arch, Attrs, KernelFamily, P

# Vectors are handed over inside a library alone, where all of it is compiled alike.
OPTIONS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fno-exceptions"),
    *("-Wall", "-Werror", "-Wno-psabi"),
)
TIME_LIMIT_S = 120
CARRIED = PACKAGE_FOLDER / "_data" / "compiled"

_units: dict[str, ctypes.CDLL] = {}
_lock = threading.Lock()


def load_unit(name: str, defined: str = "") -> ctypes.CDLL:
    """The library of a unit with what is `defined`, loaded once in a process; raises BuildError."""
    with _lock:
        source = unit_source(name, defined)
        if source not in _units:
            carried = carried_library(name, defined)
            _units[source] = _opened(carried) if carried else load_library(source)
        return _units[source]


class UnitFamily(KernelFamily[P]):
    """A family whose kernels are functions of one unit, for images of all sizes."""

    arch_kinds = frozenset(("cpu",))
    build_s: ClassVar[float] = 2.0
    unit: ClassVar[str]

    def defined(self, parts: P) -> str:
        """What the unit is compiled with."""
        raise NotImplementedError

    def why_not_arch(self, arch: Arch) -> str | None:
        return why_not_loadable(self.unit) or super().why_not_arch(arch)

    def why_not_config(self, parts: P, config: Attrs, arch: Arch) -> str | None:
        reason = why_not_loadable(self.unit, self.defined(parts))
        return reason or super().why_not_config(parts, config, arch)

    def source(self, parts: P, config: Attrs, arch: Arch) -> str | None:
        defined = self.defined(parts)
        return None if carried_library(self.unit, defined) else unit_source(self.unit, defined)

    def library(self, parts: P) -> ctypes.CDLL:
        return load_unit(self.unit, self.defined(parts))


def why_not_loadable(name: str, defined: str = "") -> str | None:
    """Why a unit can neither be loaded nor compiled here, or None if it can."""
    return NO_COMPILER if not carried_library(name, defined) and cxx_compiler() is None else None


def unit_source(name: str, defined: str = "") -> str:
    """The source of a unit, after lines that define what it leaves open."""
    return defined + (data_folder("csrc") / "cpu" / f"{name}.cpp").read_text(encoding="utf-8")


def carried_library(name: str, defined: str = "") -> Path | None:
    """The library that this wheel carries of a unit for this CPU, if it does: with nothing defined.

    The instruction set is the one that torch uses, so ATEN_CPU_CAPABILITY=avx2 chooses that one.
    """
    if defined:
        return None
    chosen = (torch.backends.cpu.get_cpu_capability().lower(), "any")
    places = (CARRIED / f"{name}.{instructions}.so" for instructions in chosen)
    return next((place for place in places if place.is_file()), None)


def load_library(source: str) -> ctypes.CDLL:
    """The library of a source that includes headers of `csrc`; raises BuildError with the log."""
    compiler = cxx_compiler()
    if compiler is None:
        raise BuildError(NO_COMPILER)
    names = ("cpu", f"{_key(source, compiler)}.so")
    content = read_blob(cache_file(*names))
    if content is None:
        place = cache_file(*names, to_write=True)
        try:
            content = _compiled(source, compiler)
        except OSError as error:
            raise BuildError(f"{place} cannot be made: {error}") from error
        with suppress(OSError):  # without room it is compiled again in the next process
            write_blob(place, content)
    return _loaded(content)


def function(library: ctypes.CDLL, name: str, arguments: Sequence[Any]) -> Any:
    """A function of a library that returns nothing; raises BuildError if it is not there."""
    try:
        found = getattr(library, name)
    except AttributeError as error:
        raise BuildError(f"{library._name} has no function {name}; install plantune again") from (
            error
        )
    found.argtypes, found.restype = list(arguments), None
    return found


def _loaded(content: bytes) -> ctypes.CDLL:
    """Loads these very bytes, which no change of the file can alter.

    Their descriptor stays open: the loader takes equal paths for the same library, so the next one
    must not get its number.
    """
    try:
        descriptor = os.memfd_create("plantune-kernel", os.MFD_CLOEXEC)
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)
    except OSError as error:
        raise BuildError(f"a compiled library cannot be loaded: {error}") from error
    return _opened(Path(f"/proc/self/fd/{descriptor}"))


def _opened(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"{library} does not load: {error}") from error


def _compiled(source: str, compiler: str) -> bytes:
    """The library of a source."""
    with tempfile.TemporaryDirectory() as folder:
        text, built = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        text.write_text(source, encoding="utf-8")
        command = [compiler, *OPTIONS, f"-I{data_folder('csrc')}", str(text), "-o", str(built)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{compiler} took over {TIME_LIMIT_S} s for one kernel") from error
        if done.returncode != 0:
            what = f"{compiler} did not compile a kernel"
            raise build_error(what, done.stderr, f"{' '.join(command)}\n\n{source}")
        return built.read_bytes()


def _key(source: str, compiler: str) -> str:
    """Everything that a compiled library depends on."""
    parts = (source, _headers_digest(), _version(compiler), " ".join(OPTIONS), cpu_identity())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def _headers_digest() -> str:
    """A digest of the contents of all headers, whatever their folder is called."""
    root = data_folder("csrc")
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.hpp")):
        total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


@cache
def _version(compiler: str) -> str:
    return subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True
    ).stdout
