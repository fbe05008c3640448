"""Compiles one CUDA source in a process of its own: `python nvrtc.py`, a request on its stdin.

It imports the standard library alone, so it starts in some 30 ms, and it may be killed: a source
that makes the compiler hang or eat memory does no harm.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


class Compilation:
    """One NVRTC program."""

    def __init__(self, library: str, source: str) -> None:
        # It asks for its builtins by name alone, and finds them once they are loaded.
        for path in sorted(Path(library).parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._nvrtc = ctypes.CDLL(library)
        self._program = ctypes.c_void_p()
        text = source.encode()
        failed = self._nvrtc.nvrtcCreateProgram(
            ctypes.byref(self._program), text, b"kernel.cu", 0, None, None
        )
        if failed:
            raise RuntimeError(f"nvrtcCreateProgram returned {failed}")

    def run(self, options: list[str]) -> bool:
        """Whether it compiles; the log says why not."""
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        return not self._nvrtc.nvrtcCompileProgram(self._program, len(options), encoded)

    def get(self, what: str) -> bytes:
        """Its ProgramLog, CUBIN or PTX."""
        size = ctypes.c_size_t()
        if getattr(self._nvrtc, f"nvrtcGet{what}Size")(self._program, ctypes.byref(size)):
            return b""
        memory = ctypes.create_string_buffer(size.value)
        getattr(self._nvrtc, f"nvrtcGet{what}")(self._program, memory)
        return memory.raw


def die_with_parent(parent: int) -> None:
    """A compilation whose parent was killed would have no time limit."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # It was killed before that.
        sys.exit("the process that asked for this compilation is gone")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Compiles into the file that the request names; the log comes back."""
    die_with_parent(request["parent"])
    limit = request["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compilation = Compilation(request["library"], request["source"])
    compiled = compilation.run(request["options"])
    if compiled:
        Path(request["result"]).write_bytes(compilation.get(request["kind"]))
    log = compilation.get("ProgramLog").rstrip(b"\0").decode(errors="replace")
    return {"compiled": compiled, "log": log}


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
