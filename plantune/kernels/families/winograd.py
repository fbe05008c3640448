"""3x3 convolutions with fewer multiplications: Winograd tiles, Karatsuba on 2x2 images.

Between the two transforms of `csrc/cpu/winograd.hpp` one grouped 1x1 oneDNN convolution makes all
products: a group a place in the transformed tile. Transformed weights are prepared on refresh. Many
images are computed in parts, one after the other, so that what is between stays in the caches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plantune.cuda.structs import fields
from plantune.graph import Step, TensorType
from plantune.kernels import onednn
from plantune.kernels.cxx import UnitFamily, function
from plantune.kernels.family import Arch, Attrs, Binding, Frame, refuse
from plantune.kernels.folded import Epilogue, Folded
from plantune.kernels.patterns.epilogue import ConvParts, usual_parts
from plantune.kernels.patterns.expression import defined_function
from plantune.layouts import aligned, view_bytes

# G of each algorithm: transforms a row of three weights into the factors of its products.
WEIGHT_TRANSFORMS: dict[str, list[list[float]]] = {
    "Winograd": [[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]],
    "Karatsuba": [[1, -1, 0], [0, 1, 0], [0, -1, 1]],
}

# What a part of the images has between the transforms: about what the caches of two cores hold.
# With 32 images of 64 x 16 x 16, 16 MiB at once, a convolution took twice the time of parts of 4
# (the least of 40 runs each in turns, 2 busy cores of an EPYC, 2026-11-23). Parts that are smaller
# than the weights would read these too often.
PART_BYTES = 4 << 20
# Smaller parts than this one of PART_BYTES cost more than they save.
LEAST_PART = 4


class Images(ctypes.Structure):
    """The struct of that name in `csrc/cpu/winograd.hpp`."""

    _fields_ = fields("count:int height:int width:int channels:int")


@dataclass(frozen=True)
class Transforms:
    """The two transforms of one algorithm: (images, from, to), and with an epilogue between."""

    input: Callable[..., None]
    output: Callable[..., None]


@dataclass(frozen=True)
class Tiles:
    """The sizes of one of so many `parts` of a problem: `count` tiles of `images` images, with
    `places` products each.
    """

    algorithm: str
    parts: int
    images: int
    count: int
    places: int
    channels: int
    outputs: int

    @property
    def inputs_type(self) -> TensorType:
        """The transformed input."""
        return TensorType((self.count, self.places, self.channels))

    @property
    def products_type(self) -> TensorType:
        return TensorType((self.count, self.places, self.outputs))


@dataclass(frozen=True)
class WinogradParts(ConvParts):
    tiles: Tiles


class WinogradConv(UnitFamily[WinogradParts], onednn.OneDnnFamily[WinogradParts]):
    """Config: `layout`, which is nhwc: the transforms work on all channels of a pixel at once."""

    name: ClassVar = "winograd"
    unit: ClassVar = name

    def defined(self, parts: WinogradParts) -> str:
        return defined_function(parts.epilogue.chain)

    def read(self, step: Step) -> WinogradParts:
        parts = usual_parts(step)
        attrs, (x, w) = parts.conv.attrs, (step.types[name] for name in parts.conv.inputs)
        unit = all(attrs[key] == (1, 1) for key in ("stride", "padding", "dilation"))
        rows, columns = x.shape[2:]
        plain = w.shape[2:] == (3, 3) and unit and attrs["groups"] == 1
        odd = rows % 2 or columns % 2 or x.numel == 0
        refuse(
            {
                f"the transforms are written for float32, got {x.dtype}": x.dtype != "float32",
                "only 3x3 convolutions of stride 1 and padding 1 without groups": not plain,
                f"tiles of 2x2 do not cover an image of {rows}x{columns}": odd,
            }
        )
        return WinogradParts(step, parts.epilogue, _tiles(x.shape, w.shape))

    def workspace_bytes(self, parts: WinogradParts, config: Attrs) -> int:
        tiles = parts.tiles
        return aligned(tiles.inputs_type.size_bytes) + tiles.products_type.size_bytes

    def build(self, parts: WinogradParts, config: Attrs, arch: Arch) -> Transforms:
        library, algorithm = self.library(parts), parts.tiles.algorithm.lower()
        address, images = ctypes.c_void_p, ctypes.POINTER(Images)
        after = [images, address, ctypes.POINTER(Epilogue), address]
        return Transforms(
            function(library, f"{algorithm}_input", [images, address, address]),
            function(library, f"{algorithm}_output", after),
        )

    def bind(self, parts: WinogradParts, config: Attrs, frame: Frame) -> Binding:
        tiles, values, transforms = parts.tiles, frame.values, frame.built
        x, residual, y = parts.x, parts.epilogue.residual, values[parts.y]
        inputs, products = _workspace(tiles, frame)
        multiply = _multiplying(inputs, products, tiles)
        height, width = parts.step.types[x].shape[2:]
        before = Images(tiles.images, height, width, tiles.channels)
        after = Images(tiles.images, height, width, tiles.outputs)
        x_bytes, y_bytes = (parts.step.types[n].size_bytes // tiles.parts for n in (x, parts.y))
        folded = Folded(parts.epilogue, values, lambda weight: _packed(weight, tiles), apart=True)

        def launch(stream: int) -> None:
            x_at, y_at = values[x].data_ptr(), y.data_ptr()
            added_at = None if residual is None else values[residual].data_ptr()
            for part in range(tiles.parts):
                moved = part * y_bytes
                added = None if added_at is None else added_at + moved
                transforms.input(before, x_at + part * x_bytes, inputs.data_ptr())
                multiply(folded.weight)
                end = folded.after_sums(added)
                transforms.output(after, products.data_ptr(), end, y_at + moved)

        return Binding(launch, folded.refresh)


def _workspace(tiles: Tiles, frame: Frame) -> tuple[Tensor, Tensor]:
    """The transformed input, then the products."""
    assert frame.workspace is not None
    start = aligned(tiles.inputs_type.size_bytes)
    return (
        view_bytes(frame.workspace, 0, tiles.inputs_type, "nchw"),
        view_bytes(frame.workspace, start, tiles.products_type, "nchw"),
    )


def _multiplying(inputs: Tensor, products: Tensor, tiles: Tiles) -> Callable[[Tensor], None]:
    """A call that fills `products` for a packed weight."""
    target, source = _grouped(products), _grouped(inputs)
    geometry = onednn.Geometry(groups=tiles.places)

    def multiply(weight: Tensor) -> None:
        products.zero_()
        onednn.add_convolution(target, source, weight, None, geometry)

    return multiply


def _tiles(x: tuple[int, ...], w: tuple[int, ...]) -> Tiles:
    algorithm = "Karatsuba" if x[2:] == (2, 2) else "Winograd"
    places = len(WEIGHT_TRANSFORMS[algorithm]) ** 2
    one = x[2] * x[3] // 4  # tiles of an image
    images = _at_once(x[0], 4 * one * places * (x[1] + w[0]), 4 * places * x[1] * w[0])
    return Tiles(algorithm, x[0] // images, images, images * one, places, x[1], w[0])


def _at_once(images: int, image_bytes: int, weight_bytes: int) -> int:
    """How many images a part has, each of which needs so many bytes between the transforms."""
    most = max(PART_BYTES, weight_bytes)
    fitting = (n for n in range(images, 0, -1) if images % n == 0 and n * image_bytes <= most)
    found = next(fitting, 1)
    return found if LEAST_PART * found * image_bytes >= most else images


def _grouped(tensor: Tensor) -> Tensor:
    """(tiles, places, channels) as an image of one row whose channels are grouped by place."""
    count, places, channels = tensor.shape
    return tensor.view(1, 1, count, places * channels).permute(0, 3, 1, 2)


def _packed(weight: Tensor, tiles: Tiles) -> Tensor:
    """The transformed weight, packed for the grouped convolution; computed in float64."""
    g = torch.tensor(WEIGHT_TRANSFORMS[tiles.algorithm], dtype=torch.float64)
    factors = torch.einsum("ap,bq,ocpq->aboc", g, g, weight.double()).float()
    groups = factors.reshape(tiles.places * tiles.outputs, tiles.channels, 1, 1)
    shape = (1, tiles.places * tiles.channels, 1, tiles.count)
    return onednn.pack(groups, onednn.Geometry(groups=tiles.places), shape)


FAMILY = WinogradConv()
