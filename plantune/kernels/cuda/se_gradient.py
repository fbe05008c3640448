"""How the kernels of a squeeze-and-excite gradient share their work, and the memory for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from plantune.base.canonical import Attrs
from plantune.graph.types import DTYPES
from plantune.kernels.cuda.small_matrix import shared_bytes_at_most
from plantune.kernels.cuda.vector_kernel import ELEMENTS, VECTOR_BYTES, dtypes_of
from plantune.kernels.family import Frame
from plantune.kernels.patterns.element_passes import ElementParts, Pass

# Vectors of images that a block holds in registers, and registers of a thread beside them.
HELD_MOST, LEAST_REGISTERS = 4096, 64
WEIGHT_KEPT_BYTES = 32 << 10  # of a weight in registers
# Tiles of the layers' gradients, by whether tensor cores make them: channels and hidden ones.
TILES = {False: (32, 8), True: (64, 32)}
# Warps of a block that adds them.
ADDING_WARPS = 8


@dataclass(frozen=True)
class SeGradParts(ElementParts):
    """A gradient as blocks and threads divide it."""

    @property
    def width(self) -> int:
        """Channels that a thread takes at once."""
        return VECTOR_BYTES // DTYPES[self.held_dtype].itemsize

    @cached_property
    def dtypes(self) -> frozenset[str]:
        """The element types of all operands, and of what is made of them."""
        return dtypes_of(self.step)

    @property
    def mixed(self) -> bool:
        return len(self.dtypes) > 1

    @property
    def held_dtype(self) -> str:
        """What images are between the passes: float where there are several types."""
        return "float32" if self.mixed else self.image.dtype

    @property
    def weight(self) -> str:
        """The element type of both matrices."""
        return self.dtype_of(self.gradient.excite.matrix.weight)

    @property
    def layer_bytes(self) -> int:
        """Of an element that the layers read, or leave for their gradients."""
        return DTYPES[self.weight].itemsize

    def dtype_of(self, name: str) -> str:
        return self.step.types[name].dtype

    @property
    def layer_values(self) -> tuple[str, ...]:
        """What both layers read, and the gradients of their results where these leave."""
        leaving = dict(self.step.outputs)
        found = []
        for layer in self.gradient.layers:
            argument = () if layer.argument is None else (layer.argument,)
            excited = (layer.excited,) if layer.excited in leaving else ()
            found += [layer.matrix.weight, layer.of, *argument, *excited]
        return tuple(found)

    @property
    def parameter_gradients(self) -> tuple[str, ...]:
        made = (name for layer in self.gradient.layers for name in (layer.weight, layer.bias))
        return tuple(name for name in made if name is not None)

    @property
    def known(self) -> tuple[str, ...]:
        """Values of the first pass that are in memory as they were made."""
        made = {node.name: node.types[0].dtype for node in self.gradient.first}
        return tuple(name for name in self.stored[0] if self.dtype_of(name) == made[name])

    @cached_property
    def second_anew(self) -> Pass:
        return self._second(self.known)

    @property
    def vectors(self) -> int:
        """Vectors of a pixel's channels."""
        return self.channels // self.width

    @property
    def makes_layers(self) -> bool:
        return any(layer.weight or layer.bias for layer in self.gradient.layers)

    @property
    def adds(self) -> bool:
        """Whether there is a second kernel."""
        return self.makes_layers or bool(self.gradient.sums)

    @property
    def layers_mma(self) -> bool:
        """Whether tensor cores make the layers' gradients: of 16-bit values."""
        return self.layer_bytes == 2

    @property
    def tiles(self) -> int:
        """Tiles of the layers' gradients."""
        channels, hidden = TILES[self.layers_mma]
        tiles = -(-self.channels // channels) * -(-self.hidden // hidden)
        return tiles if self.makes_layers else 0

    @property
    def sums_of_tile(self) -> int:
        """The sums of a tile: those of both weights and both biases."""
        channels, hidden = TILES[self.layers_mma]
        if not self.layers_mma:  # a warp adds its 8 values of the second bias by 32 lanes
            return channels * (2 * hidden + 2)
        columns = min(-(-self.hidden // 8) * 8, hidden)
        return 2 * channels * columns + channels + columns

    @property
    def splits(self) -> int:
        """Parts of the images that are added by different blocks: about as many as a warp of eight
        then has images, so that their parts are added as quickly.
        """
        return max(math.isqrt(self.image.shape[0] // ADDING_WARPS), 1)

    def rounds(self, config: Attrs) -> int:
        """Vectors of an image that a thread takes."""
        team = int(config["threads"]) // int(config["images"])
        groups = min(team // self.vectors, self.pixels)
        return -(-self.pixels // groups)

    def held(self, config: Attrs) -> int:
        """Vectors of images that a block would hold between the passes."""
        vectors = self.rounds(config) * len(self.second.images)
        return vectors * int(config["threads"])

    def hold(self, config: Attrs) -> str | None:
        """Where a block holds images, None if it reads them again."""
        if config["hold"] == "registers" and self.held(config) > HELD_MOST:
            return None
        return str(config["hold"])

    def registers(self, config: Attrs) -> int:
        """What a thread takes without spilling; both weights are in registers, if small."""
        held = self.held(config) * VECTOR_BYTES * (self.hold(config) == "registers")
        weight = self.channels * self.hidden * self.layer_bytes
        kept = 2 * weight * (weight <= WEIGHT_KEPT_BYTES)
        # In float each weight is multiplied with all images; with four of them 128 were too few on
        # sm80 and sm100.
        sums = max(int(config["images"]) - 2, 0) if config["math"] == "simt" else 0
        return LEAST_REGISTERS + sums + math.ceil((held + kept) / 4 / int(config["threads"]))

    def blocks(self, config: Attrs) -> int:
        return -(-self.image.shape[0] // int(config["images"]))

    def held_bytes(self, config: Attrs) -> int:
        """Dynamic shared memory of a block."""
        held = config["hold"] == "shared"
        return self.held(config) * VECTOR_BYTES if held else 0

    def moved_bytes(self, config: Attrs) -> float:
        """What all blocks read and write of images."""
        again = self.second_anew.images if self.hold(config) is None else ()
        return self.step.traffic_bytes + sum(self.step.types[name].size_bytes for name in again)

    def weights_bytes(self, config: Attrs) -> float:
        """What all blocks read of both layers' weights, which stay in the second-level cache."""
        weight = self.channels * self.hidden * self.layer_bytes
        return 2 * weight * self.blocks(config)

    def shared_bytes_declared(self, config: Attrs) -> int:
        """What plantune::SeGrad declares, and what `add` does."""
        images, threads = int(config["images"]), int(config["threads"])
        groups = min(threads // images // self.vectors, self.pixels)
        sums = images * groups * (self.channels + 16) * 4
        layers = sum(
            shared_bytes_at_most(rows, columns, images, threads, config["math"])
            for rows, columns in ((self.hidden, self.channels), (self.channels, self.hidden))
        )
        saved = images * (self.channels + self.hidden) * self.layer_bytes
        own = (len(self.gradient.sums) + 1) * threads // 8 + 64
        return sums + layers + saved + own


def operands_of(parts: SeGradParts) -> str:
    """The types of plantune::SeGradMixed, where operands have several."""
    sums = [node.name for node in parts.gradient.sums]
    single = (
        ELEMENTS[parts.weight],
        *(_element(parts, names) for names in (parts.parameter_gradients, sums)),
    )
    small = [operand.name for operand in parts.small]
    listed = (parts.first.images, small, (*parts.stored[0], *parts.stored[1]))
    types = (", ".join(ELEMENTS[parts.dtype_of(name)] for name in names) for names in listed)
    of_lists = (f"plantune::Types<{each}>" for each in types)
    return f"plantune::SeGradMixed<{', '.join((*single, *of_lists))}>"


def _element(parts: SeGradParts, names: Sequence[str]) -> str:
    """The one type of these values in C++; any will do for none."""
    return ELEMENTS[parts.dtype_of(names[0])] if names else "float"


@dataclass(frozen=True)
class Workspace:
    """What the kernels leave for each other: gradients of both layers, and parts of sums."""

    parts: SeGradParts
    config: Attrs

    @property
    def _sizes(self) -> dict[str, int]:
        parts, layers = self.parts, self.parts.makes_layers
        images, size = parts.image.shape[0], parts.layer_bytes
        return {
            "dexcite": images * parts.channels * size * layers,
            "dsqueeze": images * parts.hidden * size * layers,
            "parts": 4 * len(parts.gradient.sums) * parts.blocks(self.config),
            "layers": 4 * parts.sums_of_tile * parts.tiles * parts.splits,
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
