"""What `csrc/cuda/warp_mma.h` expects: the dtypes, and the order of packed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from plantune.cuda.build import Binary
from plantune.cuda.kernel import Kernel
from plantune.kernels.constants import Constant
from plantune.kernels.vector_kernel import PROGRAMMATIC_FROM
from plantune.space.arch import Arch

DTYPES = ("float16", "bfloat16")
# The weights of one product of a warp: 32 channels, 16 values of each.
CHANNELS, VALUES, ROWS = 32, 16, 16


def why_not_elements(dtype: str, arch: Arch) -> str | None:
    """Why the tensor cores of an arch do not take this dtype here, or None where they do."""
    assert arch.cuda is not None
    if dtype not in DTYPES:
        return f"tensor cores take {' and '.join(DTYPES)} here, not {dtype}"
    if dtype == "bfloat16" and "bf16" not in arch.cuda.features:
        return f"the tensor cores of {arch.name} have no bfloat16"
    return None


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class PackedWeight:
    """A weight (channels, values) in the order in which the lanes of a warp read it.

    Both sizes are padded with zeros; channels to a multiple of `tile_n`, which 32 must divide.
    """

    def __init__(self, weight: tuple[int, int], tile_n: int) -> None:
        self._size = weight
        self._padded = padded(weight[0], tile_n), padded(weight[1], VALUES)

    def packed(self, weight: Tensor) -> Tensor:
        """A weight of any shape whose rows are the channels, in that order."""
        (channels, values), rows = self._padded, weight.reshape(self._size)
        plain = weight.new_zeros(channels, values)
        plain[: self._size[0], : self._size[1]] = rows
        # Channel 8 * (lane / 8) + 4 * h + 2 * (e / 4) + lane / 4 % 2, value 4 * (lane % 4) + e % 4
        # becomes element e of vector 32 * h + lane.
        shape = (channels // CHANNELS, 4, 2, 2, 2, values // VALUES, 4, 4)
        return plain.view(shape).permute(5, 0, 2, 1, 4, 6, 3, 7)

    def constant(self, values: Mapping[str, Tensor], name: str, like: Tensor) -> Constant:
        """The weight of that name so; `like` has the dtype and the device."""
        channels, columns = self._padded
        shape = (columns // VALUES, channels // CHANNELS, 2, 4, 2, 4, 2, 4)
        memory = like.new_empty(shape)
        return Constant(values, name, memory, self.packed, packs=True)


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
