"""What `csrc/cuda/warp_mma.h` expects: the dtypes, and the order of packed weights."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TypeVar

from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, Frame
from plantune.kernels.cuda.launcher import Launcher
from plantune.kernels.patterns.epilogue import ConvParts

DTYPES = ("float16", "bfloat16")
# The weights of one product of a warp: 32 channels, 16 values of each.
CHANNELS, VALUES, ROWS = 32, 16, 16
# The end of a source whose header defines `Kernel`.
ENTRY = """\
static_assert(Kernel::kSharedBytes == {shared_bytes}, "the launch asks for what the kernel uses");

extern "C" __global__ void __launch_bounds__(Kernel::kThreads)
run(const __grid_constant__ Kernel::Arguments arguments) {{
  Kernel::run(arguments);
}}
"""


def why_not_elements(dtype: str, arch: Arch) -> str | None:
    """Why the tensor cores of an arch do not take this dtype here, or None if they do."""
    if dtype not in DTYPES:
        return f"tensor cores take {' and '.join(DTYPES)} here, not {dtype}"
    if dtype == "bfloat16" and "bf16" not in arch.gpu.features:
        return f"the tensor cores of {arch.name} have no bfloat16"
    return None


def not_countable(pixels: int) -> dict[str, bool]:
    """The reason that a kernel cannot count so many pixels, and whether it holds."""
    return {f"pixels are counted in 30 bits, got {pixels}": not 0 < pixels < 1 << 30}


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class TiledParts(ConvParts):
    """A 1x1 convolution whose blocks make `tile_m` pixels of `tile_n` channels each."""

    @abstractmethod
    def shared_bytes(self, config: Attrs) -> int:
        """Dynamic shared memory of one block."""

    def blocks(self, config: Attrs) -> tuple[int, int]:
        return -(-self.pixels // int(config["tile_m"])), -(-self.outputs // int(config["tile_n"]))


T = TypeVar("T", bound=TiledParts)


class TiledFamily(CudaFamily[T]):
    """A family of such convolutions on the tensor cores of every arch."""

    def why_not_config(self, parts: T, config: Attrs, arch: Arch) -> str | None:
        tile_n, outputs = config["tile_n"], parts.outputs
        if tile_n >= padded(outputs, CHANNELS) + CHANNELS:
            return f"tile_n {tile_n} has warps without any of the {outputs} channels"
        reason = why_not_elements(parts.dtype, arch)
        return reason or super().why_not_config(parts, config, arch)

    def shared_bytes(self, parts: T, config: Attrs, arch: Arch) -> int:
        return parts.shared_bytes(config)

    def launcher(self, parts: T, config: Attrs, frame: Frame) -> Launcher:
        threads, shared_bytes = self.threads(parts, config), parts.shared_bytes(config)
        return Launcher(frame.built, parts.blocks(config), threads, shared_bytes=shared_bytes)
