"""Has an NVRTC compile one source, in a process of its own that may be ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plantune.base.build_log import build_error
from plantune.devices.cuda import nvrtc as child
from plantune.devices.cuda.toolchain import Nvrtc, include_folders
from plantune.errors import BuildError
from plantune.space.arch import Arch

OPTIONS = ("--std=c++17", "-default-device", "--ptxas-options=-v")
TIME_LIMIT_S = 120
MEMORY_LIMIT_BYTES = 6 << 30
Kind = Literal["CUBIN", "PTX"]


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a source: an image, or None if it refused; the log says why."""

    image: bytes | None
    log: str


def options_for(arch: Arch, kind: Kind) -> tuple[str, ...]:
    target = arch.gpu.nvrtc_arch.replace("sm_", "compute_" if kind == "PTX" else "sm_")
    return (f"--gpu-architecture={target}", *OPTIONS)


def run_nvrtc(nvrtc: Nvrtc, source: str, options: tuple[str, ...], kind: Kind) -> Compiled:
    """Compiles a source; raises BuildError if the compiler dies or takes too long."""
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
        answer = _asked(request, nvrtc)
        return Compiled(result.read_bytes() if answer["compiled"] else None, answer["log"])


def described(options: tuple[str, ...], source: str) -> str:
    """What the compiler was given, for its log."""
    return f"{' '.join(options)}\n\n{source}"


def _asked(request: Mapping[str, Any], nvrtc: Nvrtc) -> Any:
    """The compiling process's answer."""
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
        raise BuildError(f"{nvrtc} took over {TIME_LIMIT_S} s for one kernel") from error
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        what = (
            f"{nvrtc} died ({done.returncode}), as when it needs more than "
            f"{MEMORY_LIMIT_BYTES >> 30} GiB"
        )
        said = done.stderr.decode(errors="replace")
        raise build_error(what, said, described(request["options"], request["source"])) from error
