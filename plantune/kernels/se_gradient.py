"""How the kernels of a squeeze-and-excite gradient share their work, and the memory for it."""

from __future__ import annotations

from dataclasses import dataclass

from plantune.canonical import Attrs
from plantune.kernels import vector_kernel
from plantune.kernels.family import Frame
from plantune.kernels.patterns.element_passes import ElementParts
from plantune.kernels.small_matrix import shared_bytes_at_most

# Vectors of images that a block holds in registers.
HELD_MOST = 4096
# Of the layers' gradients: channels and hidden channels of a tile, and sums of each lane.
TILE_CHANNELS, TILE_HIDDEN, SUMS_OF_TILE = 32, 8, 18 * 32
# Blocks that add the layers' gradients, and images that one adds at least.
ADDING_BLOCKS, ADDED_IMAGES = 264, 32


@dataclass(frozen=True)
class SeGradParts(ElementParts):
    """A gradient as blocks and threads divide it."""

    @property
    def vectors(self) -> int:
        """Vectors of a pixel's channels."""
        return self.channels * self.image.torch_dtype.itemsize // vector_kernel.VECTOR_BYTES

    @property
    def makes_layers(self) -> bool:
        return any(layer.weight or layer.bias for layer in self.gradient.layers)

    @property
    def adds(self) -> bool:
        """Whether there is a second kernel."""
        return self.makes_layers or bool(self.gradient.sums)

    @property
    def tiles(self) -> int:
        """Tiles of the layers' gradients."""
        tiles = -(-self.channels // TILE_CHANNELS) * -(-self.hidden // TILE_HIDDEN)
        return tiles if self.makes_layers else 0

    @property
    def splits(self) -> int:
        """Parts of the images that are added by different blocks."""
        most = max(self.image.shape[0] // ADDED_IMAGES, 1)
        return min(most, max(ADDING_BLOCKS // max(self.tiles, 1), 1))

    def rounds(self, config: Attrs) -> int:
        """Vectors of an image that a thread takes."""
        team = int(config["threads"]) // int(config["images"])
        groups = min(team // self.vectors, self.pixels)
        return -(-self.pixels // groups)

    def held(self, config: Attrs) -> int:
        """Vectors of images that a block would hold between the passes."""
        vectors = self.rounds(config) * len(self.second(held=True).images)
        return vectors * int(config["threads"])

    def hold(self, config: Attrs) -> str | None:
        """Where a block holds images, None if it reads them again."""
        if config["hold"] == "registers" and self.held(config) > HELD_MOST:
            return None
        return str(config["hold"])

    def blocks(self, config: Attrs) -> int:
        return -(-self.image.shape[0] // int(config["images"]))

    def shared_bytes_declared(self, config: Attrs) -> int:
        """What plantune::SeGrad declares, and what `add` does."""
        images, threads = int(config["images"]), int(config["threads"])
        size = self.image.torch_dtype.itemsize
        groups = min(threads // images // self.vectors, self.pixels)
        sums = images * groups * (self.channels + 16) * 4
        layers = sum(
            shared_bytes_at_most(rows, columns, images, threads)
            for rows, columns in ((self.hidden, self.channels), (self.channels, self.hidden))
        )
        saved = images * (self.channels + self.hidden) * size
        own = (len(self.gradient.sums) + 1) * threads // 8 + 64
        return sums + layers + saved + own


@dataclass(frozen=True)
class Workspace:
    """What the kernels leave for each other: gradients of both layers, and parts of sums."""

    parts: SeGradParts
    config: Attrs

    @property
    def _sizes(self) -> dict[str, int]:
        parts, layers = self.parts, self.parts.makes_layers
        images, size = parts.image.shape[0], parts.image.torch_dtype.itemsize
        return {
            "dexcite": images * parts.channels * size * layers,
            "dsqueeze": images * parts.hidden * size * layers,
            "parts": 4 * len(parts.gradient.sums) * parts.blocks(self.config),
            "layers": 4 * SUMS_OF_TILE * parts.tiles * parts.splits,
            "arrived": 4 * parts.tiles,
        }

    @property
    def bytes(self) -> int:
        return sum(-(-size // 16) * 16 for size in self._sizes.values())

    def addresses(self, frame: Frame) -> dict[str, int]:
        at = 0 if frame.workspace is None else frame.workspace.data_ptr()
        found = {}
        for name, size in self._sizes.items():
            found[name] = at if size else 0
            at += -(-size // 16) * 16
        return found
