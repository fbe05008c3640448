"""What `csrc/cuda/warp_mma.h` expects: the dtypes, and the order of packed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plantune.cuda.build import Binary
from plantune.cuda.kernel import Kernel
from plantune.kernels.vector_kernel import PROGRAMMATIC_FROM
from plantune.space.arch import Arch

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
    assert arch.cuda is not None
    if dtype not in DTYPES:
        return f"tensor cores take {' and '.join(DTYPES)} here, not {dtype}"
    if dtype == "bfloat16" and "bf16" not in arch.cuda.features:
        return f"the tensor cores of {arch.name} have no bfloat16"
    return None


def why_not_tile_n(tile_n: int, outputs: int) -> str | None:
    """Why not so many channels a block, or None if each warp has some."""
    if tile_n >= padded(outputs, CHANNELS) + CHANNELS:
        return f"tile_n {tile_n} has warps without any of the {outputs} channels"
    return None


def not_countable(pixels: int) -> dict[str, bool]:
    """The reason that a kernel cannot count so many pixels, and whether it holds."""
    return {f"pixels are counted in 30 bits, got {pixels}": not 0 < pixels < 1 << 30}


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class TiledKernel:
    """A kernel whose blocks make `tile_m` pixels of `tile_n` channels each."""

    def __init__(
        self, built: Binary, config: Mapping[str, Any], pixels: int, channels: int
    ) -> None:
        self._kernel = Kernel(built)
        self._grid = (-(-pixels // int(config["tile_m"])), -(-channels // int(config["tile_n"])), 1)
        self._programmatic = self._kernel.written_for >= PROGRAMMATIC_FROM

    def launch(
        self, stream: int, threads: int, arguments: Sequence[Any], shared_bytes: int
    ) -> None:
        self._kernel.launch(
            stream,
            self._grid,
            threads,
            arguments,
            shared_bytes=shared_bytes,
            programmatic=self._programmatic,
        )
