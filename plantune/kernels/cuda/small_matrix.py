"""How `csrc/cuda/small_matrix.h` takes its matrices."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn.functional import pad

from plantune.graph import Attrs, TensorType
from plantune.kernels.legality import first_reason
from plantune.kernels.patterns.squeeze_excite import Layer
from plantune.kernels.weights.constants import Arrangement
from plantune.space import Arch

# Images that one product of tensor cores has columns for, and the chips that have it.
IMAGES_MIN, IMAGES_MAX, MMA_FROM = 2, 4, (8, 0)
TILE = 16
UNIT = 4  # columns of a row that a lane reads at least, without tensor cores
HIDDEN_MAX = 256
STATIC_SHARED_BYTES = 48 << 10


def by_tiles(config: Attrs) -> bool:
    """Whether the `math` of both layers of a squeeze-and-excite is that of tensor cores."""
    return bool(config["math"] == "mma")


def unit_of(config: Attrs) -> int:
    """What the rows of both matrices are padded to."""
    return TILE if by_tiles(config) else UNIT


def kind_of(config: Attrs) -> str:
    """What the header calls it."""
    return "SmallMatrixMma" if by_tiles(config) else "SmallMatrix"


class Block(Protocol):
    """What a block takes images of."""

    @property
    def image(self) -> TensorType: ...

    @property
    def width(self) -> int:
        """Channels that a thread takes at once."""

    @property
    def weight(self) -> str:
        """The element type of both matrices."""


def why_not_block(parts: Block, config: Attrs, declared: int, arch: Arch) -> str | None:
    """Why a block cannot take its images, each of which has its share of the threads, and both
    layers, or None if it can; it has `declared` so much shared memory.
    """
    image = parts.image
    images, vectors = int(config["images"]), image.shape[1] // parts.width
    team = int(config["threads"]) // images
    reason = first_reason(
        {
            f"a block of {images} images is larger than the batch": images > image.shape[0],
            f"{team} threads of an image do not cover the {vectors} vectors of its channels": team
            < vectors,
            f"it declares {declared} bytes of shared memory, {STATIC_SHARED_BYTES} may be": declared
            > STATIC_SHARED_BYTES,
        }
    )
    return reason or (why_not_mma(parts.weight, images, arch) if by_tiles(config) else None)


def why_not_mma(dtype: str, images: int, arch: Arch) -> str | None:
    """Why tensor cores do not multiply here (SmallMatrixMma), or None if they do."""
    if dtype == "float32" or arch.gpu.compute_capability < MMA_FROM:
        return f"these products need 16-bit values and sm80 or later, got {dtype} on {arch.name}"
    if not IMAGES_MIN <= images <= IMAGES_MAX:
        return f"a product has columns for {IMAGES_MIN} to {IMAGES_MAX} images, got {images}"
    return None


def matrix(layer: Layer, type_: TensorType, unit: int = 1) -> Arrangement:
    """A layer's weight by rows, which end at whole units of columns."""
    padding = -layer.depth % unit
    if not padding:
        shape = (layer.width, layer.depth)
        return Arrangement(shape, type_.torch_dtype, layer.rows, in_place=True)

    def order(weight: Tensor) -> Tensor:
        return pad(layer.rows(weight), (0, padding))

    return Arrangement((layer.width, layer.depth + padding), type_.torch_dtype, order, packs=True)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def shared_bytes_at_most(
    rows: int, columns: int, images: int, threads: int, math: str = "mma"
) -> int:
    """What a kind keeps in shared memory: its vectors, and sums of the parts of a product."""
    vectors = images * (_up(columns, TILE) + 3 * TILE) * 4
    parts = images * max(threads // 32, -(-rows // TILE)) if math == "mma" else 1
    return vectors + parts * TILE * 4
