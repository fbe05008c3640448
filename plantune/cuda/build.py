"""Compiles rendered CUDA sources into binaries, cached by content."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plantune.blobs import read_blob, write_blob
from plantune.cuda import nvrtc as child
from plantune.cuda.toolchain import (
    Nvrtc,
    headers_digest,
    include_folders,
    nvrtc_for,
    release_digest,
)
from plantune.env import cache_folder
from plantune.errors import BuildError
from plantune.space.arch import Arch

OPTIONS = ("--std=c++17", "-default-device", "--ptxas-options=-v")
TIME_LIMIT_S = 120
MEMORY_LIMIT_BYTES = 6 << 30
Kind = Literal["CUBIN", "PTX"]


@dataclass(frozen=True)
class Usage:
    """What one kernel of a binary takes, as the assembler counted it."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class Binary:
    """Compiled kernels. `key` names their contents; equal keys are equal kernels."""

    key: str
    image: bytes
    log: str

    @property
    def usage(self) -> Mapping[str, Usage]:
        """Each kernel's resources by its name; empty for PTX, which is not assembled yet."""
        return usage_in(self.log)


def compile_cuda(source: str, arch: Arch, *, kind: Kind = "CUBIN") -> Binary:
    """The binary of a source for an arch, from the cache where it was compiled before.

    Raises BuildError with the compiler's log. PTX runs on any later chip too, through the driver.
    """
    nvrtc = nvrtc_for(arch)
    assert arch.cuda is not None
    target = arch.cuda.nvrtc_arch.replace("sm_", "compute_" if kind == "PTX" else "sm_")
    options = (f"--gpu-architecture={target}", *OPTIONS)
    key = _key(source, nvrtc, options)
    place = cache_folder() / "cuda" / f"{key}.bin"
    cached = _read(place, key)
    if cached is not None:
        return cached
    binary = _compiled(source, nvrtc, options, key, kind)
    _write(place, binary)
    return binary


def usage_in(log: str) -> dict[str, Usage]:
    """Reads the assembler's report of each kernel."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        name = part[: part.index("'")]
        found[name] = Usage(
            registers=_number(r"Used (\d+) registers", part),
            shared_bytes=_number(r"(\d+) bytes smem", part),
            stack_bytes=_number(r"(\d+) bytes stack frame", part),
            spill_bytes=_number(r"(\d+) bytes spill stores", part),
        )
    return found


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def _compiled(source: str, nvrtc: Nvrtc, options: tuple[str, ...], key: str, kind: Kind) -> Binary:
    includes = [f"-I{folder}" for folder in include_folders(nvrtc)]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "kernel"
        request = {
            "library": str(nvrtc.library),
            "source": source,
            "options": [*options, *includes],
            "kind": kind,
            "result": str(result),
            "memory_bytes": MEMORY_LIMIT_BYTES,
            "parent": os.getpid(),
        }
        answer = _asked(request, f"{nvrtc} {' '.join(options)}")
        if not answer["compiled"]:
            raise BuildError(f"{nvrtc} {' '.join(options)}\n{answer['log']}\n{source}")
        return Binary(key, result.read_bytes(), answer["log"])


def _asked(request: Mapping[str, Any], command: str) -> Any:
    """The compiling process's answer; raises BuildError where it dies or takes too long."""
    arguments = [sys.executable, "-I", "-S", str(Path(child.__file__))]
    try:
        done = subprocess.run(
            arguments,
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command}: took over {TIME_LIMIT_S} s") from error
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        said = done.stderr.decode(errors="replace")[-2000:]
        raise BuildError(
            f"{command}: the compiler died ({done.returncode}), as when it needs more than "
            f"{MEMORY_LIMIT_BYTES >> 30} GiB\n{said}"
        ) from error


def _key(source: str, nvrtc: Nvrtc, options: tuple[str, ...]) -> str:
    """Everything that a binary depends on."""
    parts = (source, headers_digest(), release_digest(nvrtc), *options)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _read(place: Path, key: str) -> Binary | None:
    """The cached binary, None where there is none or its bytes are not those that were written."""
    content = read_blob(place)
    if content is None:
        return None
    log, _, image = content.partition(b"\0")
    return Binary(key, image, log.decode())


def _write(place: Path, binary: Binary) -> None:
    """Keeps the binary; where there is no room, it is compiled again another time."""
    with suppress(OSError):
        write_blob(place, binary.log.encode() + b"\0" + binary.image)
