"""Compiles rendered CUDA sources into binaries, cached by content."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plantune.base.blobs import read_blob, write_blob
from plantune.base.build_log import build_error
from plantune.base.paths import cache_file
from plantune.devices.cuda.choice import fitting, nvrtc_for
from plantune.devices.cuda.compiler import Kind, described, options_for, run_nvrtc
from plantune.devices.cuda.toolchain import Nvrtc, headers_digest, release_digest
from plantune.space.arch import Arch


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
    """The binary of a source for an arch, from the cache if it was compiled before.

    Raises BuildError with the compiler's log. PTX runs on any later chip too, through the driver.
    """
    options = options_for(arch, kind)
    for nvrtc in fitting(arch):  # what is there has been compiled: that needs no probe
        cached = _read(*_place(source, nvrtc, options))
        if cached is not None:
            return cached
    nvrtc = nvrtc_for(arch)
    compiled = run_nvrtc(nvrtc, source, options, kind)
    if compiled.image is None:
        what = f"{nvrtc} did not compile a kernel for {arch.name}"
        raise build_error(what, compiled.log, described(options, source))
    place, key = _place(source, nvrtc, options, to_write=True)
    binary = Binary(key, compiled.image, compiled.log)
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


def _place(
    source: str, nvrtc: Nvrtc, options: tuple[str, ...], *, to_write: bool = False
) -> tuple[Path, str]:
    """Where a binary is kept, and its key."""
    key = _key(source, nvrtc, options)
    return cache_file("cuda", f"{key}.bin", to_write=to_write), key


def _key(source: str, nvrtc: Nvrtc, options: tuple[str, ...]) -> str:
    """Everything that a binary depends on."""
    parts = (source, headers_digest(), release_digest(nvrtc), *options)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _read(place: Path, key: str) -> Binary | None:
    """The cached binary, None if there is none or its bytes are not those that were written."""
    content = read_blob(place)
    if content is None:
        return None
    log, _, image = content.partition(b"\0")
    return Binary(key, image, log.decode())


def _write(place: Path, binary: Binary) -> None:
    """Keeps the binary; if there is no room, it is compiled again next time."""
    with suppress(OSError):
        write_blob(place, binary.log.encode() + b"\0" + binary.image)
