"""Compiles a rendered C++ source into a shared library, cached by content, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from plantune.build_log import build_error
from plantune.env import cache_folder, cpu_identity, cxx_compiler, data_folder
from plantune.errors import BuildError

OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wall", "-Werror")
TIME_LIMIT_S = 120


def load_library(source: str) -> ctypes.CDLL:
    """The library of a source that includes headers of `csrc`; raises BuildError with the log."""
    compiler = cxx_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found; install g++ or clang++, or set CXX")
    library = cache_folder() / "cpu" / f"{_key(source, compiler)}.so"
    if not library.exists():
        try:
            _compile(source, compiler, library)
        except OSError as error:
            raise BuildError(f"{library} cannot be made: {error}") from error
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"{library} does not load: {error}; remove it and try again") from error


def _compile(source: str, compiler: str, library: Path) -> None:
    """Compiles beside the target and moves it there, so that no one sees half a library."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
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
        os.replace(built, library)


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
