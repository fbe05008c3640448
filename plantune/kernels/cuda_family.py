"""What every family of CUDA kernels shares: building, launching next to each other."""

from __future__ import annotations

from typing import ClassVar

from plantune.cuda.build import Binary, compile_cuda
from plantune.errors import BuildError
from plantune.graph.step import Step
from plantune.kernels.family import KernelFamily
from plantune.space.arch import Arch
from plantune.values import Attrs


class CudaFamily(KernelFamily):
    """A family whose kernels are rendered from a header in `csrc/cuda` and compiled by NVRTC."""

    arch_kinds = frozenset(("cuda",))
    build_s: ClassVar[float] = 2.0
    launch_us: ClassVar[float] = 1.5
    flops_per_us: ClassVar[float] = 2e8
    bytes_per_us: ClassVar[float] = 3e6

    def threads(self, step: Step, config: Attrs) -> int:
        """Threads of one block."""
        raise NotImplementedError

    def shared_bytes(self, step: Step, config: Attrs) -> int:
        """Dynamic shared memory of one block."""
        return 0

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        assert arch.cuda is not None
        wanted, most = self.shared_bytes(step, config), arch.cuda.shared_memory_per_block_bytes
        if wanted > most:
            return f"it needs {wanted} bytes of shared memory, a block has {most}"
        return None

    def build(self, step: Step, config: Attrs, arch: Arch) -> Binary:
        source = self.source(step, config, arch)
        assert source is not None
        binary = compile_cuda(source, arch)
        reason = why_not_fits(binary, arch, self.threads(step, config))
        if reason is not None:
            raise BuildError(reason)
        return binary


def why_not_fits(binary: Binary, arch: Arch, threads: int) -> str | None:
    """Why a block of so many threads of the kernel `run` cannot be launched, or None if it can."""
    assert arch.cuda is not None
    used = binary.usage["run"]
    # Registers are given to warps in portions of 256, 8 to a thread.
    registers = -(-used.registers // 8) * 8 * threads
    if registers > arch.cuda.registers_per_sm:
        return f"{threads} threads take {registers} registers, {arch.name} has no more than " + str(
            arch.cuda.registers_per_sm
        )
    return None
