"""How `csrc/cuda/small_matrix.h` takes its matrices."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from plantune.graph.types import TensorType
from plantune.kernels.constants import Form
from plantune.kernels.patterns.squeeze_excite import Layer
from plantune.space.arch import Arch

# Images that one product of tensor cores has columns for, and the chips that have it.
IMAGES_MIN, IMAGES_MAX, MMA_FROM = 2, 4, (8, 0)
TILE = 16


def why_not_mma(dtype: str, images: int, arch: Arch) -> str | None:
    """Why tensor cores do not multiply here (SmallMatrixMma), or None if they do."""
    assert arch.cuda is not None
    if dtype == "float32" or arch.cuda.compute_capability < MMA_FROM:
        return f"these products need 16-bit values and sm80 or later, got {dtype} on {arch.name}"
    if not IMAGES_MIN <= images <= IMAGES_MAX:
        return f"a product has columns for {IMAGES_MIN} to {IMAGES_MAX} images, got {images}"
    return None


def matrix(layer: Layer, type_: TensorType, unit: int = 1) -> Form:
    """A layer's weight by rows, which end at whole units of columns."""
    padding = -layer.depth % unit
    if not padding:
        shape = (layer.width, layer.depth)
        return Form(shape, type_.torch_dtype, layer.rows, in_place=True)

    def order(weight: Tensor) -> Tensor:
        return pad(layer.rows(weight), (0, padding))

    return Form((layer.width, layer.depth + padding), type_.torch_dtype, order, packs=True)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def shared_bytes_at_most(
    rows: int, columns: int, images: int, threads: int, math: str = "mma"
) -> int:
    """What a kind keeps in shared memory: its vectors, and sums of the parts of a product."""
    vectors = images * (_up(columns, TILE) + 3 * TILE) * 4
    parts = images * max(threads // 32, -(-rows // TILE)) if math == "mma" else 1
    return vectors + parts * TILE * 4
