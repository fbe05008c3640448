"""How a convolution on Hopper is launched: tensor maps of what it copies, and its kernel."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from plantune.devices.cuda.structs import fields
from plantune.devices.cuda.tensor_map import TensorMap, tensor_map
from plantune.graph.layouts import aligned, view_bytes
from plantune.graph.step import Step
from plantune.kernels.cuda.launcher import Launcher
from plantune.kernels.family import Binding, Frame
from plantune.kernels.hopper.design import Design
from plantune.kernels.hopper.tiles import CHUNK, ROW_BYTES, Box, ConvShape
from plantune.kernels.patterns.epilogue import ConvParts
from plantune.kernels.weights.constants import Constants, Parameter

ALIGNMENT = 16  # bytes: of a tensor map's addresses and strides


class OutMaps(ctypes.Structure):
    """plantune::OutMaps."""

    _fields_ = tuple((name, TensorMap) for name in ("y", "residual", "unshifted", "saved"))


@cache
def maps_of(phases: int) -> type[ctypes.Structure]:
    """plantune::ConvMaps of so many phases."""
    fields = (("x", TensorMap), ("w", TensorMap), ("out", OutMaps * phases))
    return type("ConvMaps", (ctypes.Structure,), {"_fields_": fields})


class BlockMaps(maps_of(1)):  # type: ignore[misc]
    """plantune::BlockMaps."""

    _fields_ = (("w2", TensorMap),)


class Scalars(ctypes.Structure):
    """plantune::ConvScalars."""

    _fields_ = fields("scale:one bias:one offset:one parts", one=Parameter)


@dataclass(frozen=True)
class HopperLaunch:
    """A bound convolution: where to copy from and to. All of it is read at each launch.

    `constants` has the filter as `w`, that of a second convolution as `w2`, and what `scalars` has.
    """

    parts: ConvParts
    design: Design
    frame: Frame
    constants: Constants
    scalars: type[ctypes.Structure] = Scalars

    def bound(self) -> Binding:
        design, place = self.design, placing(self.parts, self.frame)
        kernel = Launcher(
            self.frame.built,
            design.launched,
            design.threads,
            shared_bytes=design.shared_bytes,
            cluster=design.split_k,
        )
        rows, columns = map(range, design.shape.phases)
        phases = tuple(itertools.product(rows, columns))
        kind = BlockMaps if "w2" in self.constants else maps_of(len(phases))
        parts = beyond_copies(self.parts.step, images_read(self.parts), self.frame)
        sums = design.sums(self.parts.epilogue.sums)

        def launch(stream: int) -> None:
            x, *others, copied = place(stream)
            images = self._outputs() | dict(zip(self.parts.epilogue.images, others, strict=True))
            maps = kind(
                x=image_map(x, design.shape, design.box, reuse=design.reuse, kind=self._kind),
                **self._weights(),
            )
            for i, phase in enumerate(phases):
                for word, image in images.items():
                    setattr(maps.out[i], word, self._map(word, image, phase))
            scalars = self.constants.into(self.scalars, {}, parts=parts)
            kernel.launch(stream, maps, scalars, programmatic=not copied)

        return sums.added(launch, self.frame, parts, self.constants.all)

    def _weights(self) -> dict[str, TensorMap]:
        weights = [word for word in ("w", "w2") if word in self.constants]
        design = self.design
        if design.elements.planes:
            return {word: planes_map(self._filter(word), design) for word in weights}
        rows = CHUNK if design.transposed else design.tile_n
        return {word: weight_map(self._filter(word), rows, self._kind) for word in weights}

    @property
    def _kind(self) -> str | None:
        """What factors are on the way from memory: floats are rounded to what products read."""
        elements = self.design.elements
        return "tfloat32" if elements.factor == "float32" else None

    def _map(self, word: str, image: Tensor, phase: tuple[int, int]) -> TensorMap:
        """Of the channels that a block finishes: boxes of a phase of what it writes or adds, or of
        a pool's gradient, with a margin.
        """
        design, shape = self.design, self.design.shape
        channels = design.own // -(-design.own * image.element_size() // ROW_BYTES)
        if word == "residual" and design.pool is not None:
            sides = Box(*design.pool.sides(design.box), design.box.n)
            return tile_map(image, image.shape, sides, channels)
        sizes = (shape.n, shape.o, shape.p, shape.q)
        return tile_map(image, sizes, design.box, channels, shape.phases, phase)

    def _filter(self, word: str) -> Tensor:
        """A weight as (O, R, S, C), its planes one after the other; the pixels of flattened images
        count as one.
        """
        packed, shape = self.constants.tensor(word), self.design.shape
        single = (shape.r, shape.s) == (1, 1)
        return packed.view(*packed.shape[:-3], 1, 1, -1) if single else packed

    def _outputs(self) -> dict[str, Tensor]:
        names = {"y": self.parts.y, "unshifted": self.parts.epilogue.unshifted}
        return {word: self.frame.values[name] for word, name in names.items() if name is not None}


def images_read(parts: ConvParts) -> tuple[str, ...]:
    """x, and what the epilogue reads."""
    return (parts.x, *parts.epilogue.images.values())


def placing_bytes(parts: ConvParts) -> int:
    """Room for images at addresses where no tensor map can begin."""
    return room_for(parts.step, images_read(parts))


def room_for(step: Step, names: Iterable[str]) -> int:
    """Room for copies of those images."""
    return sum(aligned(step.types[name].size_bytes) for name in names)


def beyond_copies(step: Step, names: Sequence[str], frame: Frame) -> int:
    """The address of the workspace after the copies of those images; 0 if there is none."""
    if frame.workspace is None:
        return 0
    return frame.workspace.data_ptr() + room_for(step, _movable(names, frame))


def _movable(names: Sequence[str], frame: Frame) -> list[str]:
    """The images that may have to be copied."""
    return [name for name in names if name not in frame.aligned]


def placing(parts: ConvParts, frame: Frame) -> Callable[[int], tuple[Any, ...]]:
    """`placing_images` of those that a convolution reads."""
    return placing_images(parts.step, images_read(parts), frame)


def placing_images(
    step: Step, names: Sequence[str], frame: Frame
) -> Callable[[int], tuple[Any, ...]]:
    """A call that gives each image where a tensor map can begin: itself, or a copy of it; and last
    whether one was copied. The copies are at the beginning of the workspace.
    """
    rooms, start = {}, 0
    for name in _movable(names, frame):
        assert frame.workspace is not None
        type_ = step.types[name]
        rooms[name] = view_bytes(frame.workspace, start, type_, "nhwc")
        start += aligned(type_.size_bytes)

    def place(stream: int) -> tuple[Any, ...]:
        found = {name: frame.values[name] for name in names}
        copied = False
        for name, room in rooms.items():
            image = found[name]
            if image.data_ptr() % ALIGNMENT:
                with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                    found[name] = room.copy_(image.as_strided(room.shape, room.stride()))
                copied = True
        # A convolution may be added to its own input.
        return (*(found[name] for name in names), copied)

    return place


def image_map(
    x: Tensor, shape: ConvShape, box: Box, *, reuse: bool, kind: str | None = None
) -> TensorMap:
    row = shape.c * x.element_size()
    if reuse:
        columns, rows = box.w + shape.margin[0], box.h + shape.margin[1]
        sides = (columns * shape.stride[1], rows * shape.stride[0])
    else:
        sides = (box.w * shape.stride[1], box.h * shape.stride[0])
    return tensor_map(
        kind or word(x),
        x.data_ptr(),
        (shape.c, shape.w, shape.h, shape.n),
        (row, row * shape.w, row * shape.w * shape.h),
        (ROW_BYTES // x.element_size(), *sides, box.n),
        steps=(1, shape.stride[1], shape.stride[0], 1),
    )


def weight_map(packed: Tensor, rows: int, kind: str | None = None) -> TensorMap:
    o, r, s, c = packed.shape
    row = c * packed.element_size()
    return tensor_map(
        kind or word(packed),
        packed.data_ptr(),
        (c, r * s, o),
        (row, row * r * s),
        (ROW_BYTES // packed.element_size(), 1, rows),
    )


def planes_map(packed: Tensor, design: Design) -> TensorMap:
    """Of a step's channels: filters by filters in each plane, if there is more than one."""
    planes, (o, r, s, c) = design.elements.planes, packed.shape[-4:]
    row = c * packed.element_size()
    return tensor_map(
        word(packed),
        packed.data_ptr(),
        (c, o, planes, r * s),
        (row * r * s, row * r * s * o, row),
        (design.elements.chunk, design.tile_n, planes, 1),
        swizzle_bytes=ROW_BYTES // 2,
    )


def tile_map(
    image: Tensor,
    sizes: Sequence[int],
    box: Box,
    channels: int,
    phases: tuple[int, int] = (1, 1),
    phase: tuple[int, int] = (0, 0),
) -> TensorMap:
    """Boxes of so many channels of an image of these sizes, or of the pixels of one phase of it."""
    n, c, h, w = sizes
    (down, across), (row, column) = phases, phase
    pixel, box_row = c * image.element_size(), channels * image.element_size()
    return tensor_map(
        word(image),
        image.data_ptr() + (row * w + column) * pixel,
        (c, -(-(w - column) // across), -(-(h - row) // down), n),
        (pixel * across, pixel * w * down, pixel * w * h),
        (channels, *box),
        swizzle_bytes=box_row if box_row > ALIGNMENT else 0,
    )


def word(tensor: Tensor) -> str:
    """What a tensor map calls its elements."""
    return str(tensor.dtype).removeprefix("torch.")
