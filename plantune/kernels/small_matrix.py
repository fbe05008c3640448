"""How `csrc/cuda/small_matrix.h` wants its matrices."""

from __future__ import annotations

import torch
from torch import Tensor

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

    def __init__(self, rows: int, columns: int, unit: int, like: Tensor, *, mma: bool) -> None:
        """Rows end at whole units of columns; `like` has the dtype and the device."""
        padded_rows = _up(rows, TILE) if mma else rows
        self._plain = like.new_zeros(padded_rows, _up(columns, unit))
        self._weight = self._plain[:rows, :columns]
        self._ordered = _in_tiles(self._plain) if mma else self._plain
        self.tensor = torch.empty_like(self._ordered, memory_format=torch.contiguous_format)

    def fill(self, weight: Tensor) -> None:
        self._weight.copy_(weight)
        self.tensor.copy_(self._ordered)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _in_tiles(plain: Tensor) -> Tensor:
    """Lane 4 * g + t of a tile brings (g + 8 * (r % 2), 2 * t + 8 * (r / 2) + e) for r, then e."""
    rows, columns = (size // TILE for size in plain.shape)
    return plain.view(rows, 2, 8, columns, 2, 4, 2).permute(0, 3, 2, 5, 4, 1, 6)


def shared_bytes_at_most(rows: int, columns: int, images: int, threads: int) -> int:
    """What either kind keeps in shared memory: its vectors, and sums of the parts of a product."""
    vectors = images * (_up(columns, TILE) + 2 * TILE + 8) * 4
    return vectors + images * max(threads // 32, -(-rows // TILE)) * TILE * 4
