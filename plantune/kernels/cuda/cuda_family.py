"""What every family of CUDA kernels shares: building, launching next to each other."""

from __future__ import annotations

from typing import ClassVar

from plantune.devices.cuda.build import Binary, Usage, compile_cuda
from plantune.devices.cuda.compiler import Kind
from plantune.errors import BuildError
from plantune.kernels.family import (
    Arch,
    Attrs,
    Binding,
    Frame,
    KernelFamily,
    P,
    Parts,
    Step,
    first_reason,
    images,
    refuse,
)

# With the words of its signatures, as in `plantune.kernels.family`.
__all__ = ["Arch", "Attrs", "Binding", "CudaFamily", "Frame", "P", "Parts"]
__all__ += ["Step", "first_reason", "images", "refuse"]

COUNTS_RESERVED_FROM = (10, 0)


class CudaFamily(KernelFamily[P]):
    """A family whose kernels are rendered from a header in `csrc/cuda` and compiled by NVRTC."""

    arch_kinds = frozenset(("cuda",))
    launches_kernels: ClassVar[bool] = True
    build_s: ClassVar[float] = 0.5

    def threads(self, parts: P, config: Attrs) -> int:
        """Threads of one block."""
        return int(config["threads"])

    def shared_bytes(self, parts: P, config: Attrs, arch: Arch) -> int:
        """Dynamic shared memory of one block."""
        return 0

    def why_not_config(self, parts: P, config: Attrs, arch: Arch) -> str | None:
        wanted = self.shared_bytes(parts, config, arch)
        most = arch.gpu.shared_memory_per_block_bytes
        if wanted > most:
            return f"it needs {wanted} bytes of shared memory, a block has {most}"
        return None

    def build(self, parts: P, config: Attrs, arch: Arch) -> Binary:
        binary = self._compiled(parts, config, arch)
        shared_bytes = self.shared_bytes(parts, config, arch)
        reason = why_not_fits(binary, arch, self.threads(parts, config), shared_bytes)
        if reason is not None:
            raise BuildError(reason)
        return binary

    def build_portable(self, parts: P, config: Attrs, arch: Arch) -> Binary:
        """PTX, which the driver of a later chip compiles when it is loaded."""
        reason = why_not_portable(arch)
        if reason is not None:
            raise BuildError(reason)
        return self._compiled(parts, config, arch, kind="PTX")

    def _compiled(self, parts: P, config: Attrs, arch: Arch, kind: Kind = "CUBIN") -> Binary:
        source = self.source(parts, config, arch)
        assert source is not None
        return compile_cuda(source, arch, kind=kind)


def why_not_portable(arch: Arch) -> str | None:
    """Why no later chip runs what is compiled for an arch, or None if later ones do."""
    if arch.gpu.nvrtc_arch[-1].isdigit():
        return None
    return f"what is compiled for {arch.gpu.nvrtc_arch} runs on no other chip"


def why_not_fits(
    binary: Binary, arch: Arch, threads: int, dynamic_shared_bytes: int = 0
) -> str | None:
    """Why a block of so many threads of the kernel `run` cannot be launched, or None if it can."""
    used = binary.usage["run"]
    if threads > arch.gpu.threads_per_block_max:
        return f"a block of {threads} threads, {arch.name} has no more than " + str(
            arch.gpu.threads_per_block_max
        )
    # Registers are given to warps in portions of 256, 8 to a thread.
    registers = -(-used.registers // 8) * 8 * threads
    if registers > arch.gpu.registers_per_sm:
        return f"{threads} threads take {registers} registers, {arch.name} has no more than " + str(
            arch.gpu.registers_per_sm
        )
    shared = block_shared_bytes(used, arch) + dynamic_shared_bytes
    most = arch.gpu.shared_memory_per_block_bytes
    if shared > most:
        return f"a block takes {shared} bytes of shared memory, {arch.name} has no more than {most}"
    return None


def block_shared_bytes(used: Usage, arch: Arch) -> int:
    """The shared memory that a kernel declares: for Blackwell the assembler also counts what the
    hardware keeps of each block.
    """
    counted = arch.gpu.compute_capability >= COUNTS_RESERVED_FROM
    reserved = arch.gpu.shared_memory_reserved_per_block_bytes if counted else 0
    return max(used.shared_bytes - reserved, 0)
