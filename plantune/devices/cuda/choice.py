"""Which NVRTC compiles for an arch: the newest that has compiled a probe for it."""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress
from functools import cache

from plantune.base.blobs import read_blob, write_blob
from plantune.base.build_log import first_error
from plantune.base.paths import cache_file
from plantune.devices.cuda.compiler import options_for, run_nvrtc
from plantune.devices.cuda.toolchain import Nvrtc, all_nvrtc, how_to_install, release_digest
from plantune.errors import BuildError
from plantune.space.arch import Arch

# One header of each wheel that kernels need: the runtime's, CCCL's, and one that includes crt.
PROBE = """#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda/std/cstdint>
#include <mma.h>
extern "C" __global__ void run(__half* y) { y[threadIdx.x] = __float2half(1.f); }
"""
# How NVRTC says that a header is missing, which it is until the key changes.
NO_HEADER = "cannot open source file"
_one_probe = threading.Lock()


def nvrtc_for(arch: Arch) -> Nvrtc:
    """The newest NVRTC that compiles for an arch; raises BuildError saying what is missing."""
    return _chosen(arch, all_nvrtc())


def fitting(arch: Arch) -> tuple[Nvrtc, ...]:
    """Those whose release knows the arch, the newest first, whether they compile or not."""
    return tuple(one for one in all_nvrtc() if arch.gpu.why_not_nvrtc(one.version) is None)


def _chosen(arch: Arch, known: tuple[Nvrtc, ...]) -> Nvrtc:
    reasons = []
    for nvrtc in known:
        reason = _why_not(nvrtc, arch)
        if reason is None:
            return nvrtc
        reasons.append(reason)
    how = f"to get one: {how_to_install(arch)}"
    if not reasons:
        raise BuildError(f"no NVRTC was found with CUDA's headers; {how}")
    raise BuildError(f"no NVRTC here compiles for {arch.name}: {'; '.join(reasons)}; {how}")


def _why_not(nvrtc: Nvrtc, arch: Arch) -> str | None:
    reason = arch.gpu.why_not_nvrtc(nvrtc.version)
    if reason is not None:
        return reason
    try:
        with _one_probe:
            said = _fault(nvrtc, arch)
    except BuildError as error:
        return error.what
    return f"{nvrtc} in {nvrtc.library.parent} fails: {said}" if said else None


@cache
def _fault(nvrtc: Nvrtc, arch: Arch) -> str:
    """Why the probe does not compile, "" if it does; kept in the cache under all it depends on."""
    options = options_for(arch, "CUBIN")
    key = "\0".join((PROBE, release_digest(nvrtc), *options))
    names = ("cuda", f"{hashlib.sha256(key.encode()).hexdigest()}.probe")
    kept = read_blob(cache_file(*names))
    if kept is not None:
        return kept.decode()
    found = run_nvrtc(nvrtc, PROBE, options, "CUBIN")
    said = "" if found.image is not None else first_error(found.log) or "it compiles nothing"
    if not said or NO_HEADER in said:  # what else goes wrong may be right the next time
        with suppress(OSError):
            write_blob(cache_file(*names, to_write=True), said.encode())
    return said
