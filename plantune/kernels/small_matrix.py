"""How `csrc/cuda/small_matrix.h` wants its matrices."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from plantune.kernels.constants import Constant, Room
from plantune.kernels.patterns.squeeze_excite import Layer
from plantune.space.arch import Arch

# Images that one product of tensor cores has columns for, and the chips that have it.
IMAGES_MIN, IMAGES_MAX, MMA_FROM = 2, 4, (8, 0)
TILE = 16


def why_not_mma(dtype: str, images: int, arch: Arch) -> str | None:
    """Why tensor cores do not multiply here (SmallMatrixMma), or None where they do."""
    assert arch.cuda is not None
    if dtype == "float32" or arch.cuda.compute_capability < MMA_FROM:
        return f"these products need 16-bit values and sm80 or later, got {dtype} on {arch.name}"
    if not IMAGES_MIN <= images <= IMAGES_MAX:
        return f"a product has columns for {IMAGES_MIN} to {IMAGES_MAX} images, got {images}"
    return None


class SmallMatrix:
    """A constant matrix (rows, columns) in the order in which a kernel reads it."""

    def __init__(self, rows: int, columns: int, unit: int) -> None:
        """Rows end at whole units of columns."""
        self._size, self._padded = (rows, columns), (rows, _up(columns, unit))

    def packed(self, weight: Tensor) -> Tensor:
        """The matrix so."""
        padded = weight.new_zeros(self._padded)
        padded[:, : self._size[1]] = weight
        return padded

    def constant(self, values: Mapping[str, Tensor], layer: Layer, like: Tensor) -> Constant:
        """A layer's weight so; `like` has the dtype and the device."""
        if self._padded == self._size:
            room = Room(self._size, like.dtype, like.device)
            return Constant(values, layer.weight, room, layer.rows, in_place=True)

        def order(weight: Tensor) -> Tensor:
            return self.packed(layer.rows(weight))

        memory = like.new_empty(order(like.new_empty(1, 1).expand(self._shape(layer))).shape)
        return Constant(values, layer.weight, memory, order, packs=True)

    def _shape(self, layer: Layer) -> tuple[int, int]:
        """Of the weight as the layer has it."""
        return self._size if layer.by_rows else (self._size[1], self._size[0])


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def shared_bytes_at_most(rows: int, columns: int, images: int, threads: int) -> int:
    """What either kind keeps in shared memory: its vectors, and sums of the parts of a product."""
    vectors = images * (_up(columns, TILE) + 3 * TILE) * 4
    return vectors + images * max(threads // 32, -(-rows // TILE)) * TILE * 4
