"""How a convolution on Hopper is launched: tensor maps of what it copies, and its kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plantune.cuda.kernel import Kernel
from plantune.cuda.tensor_map import TensorMap, tensor_map
from plantune.graph.step import Step
from plantune.kernels.family import Frame
from plantune.kernels.hopper.design import Design
from plantune.kernels.hopper.tiles import CHUNK, Box, ConvShape
from plantune.kernels.patterns.epilogue import ConvEpilogue
from plantune.layouts import aligned, view_bytes

ALIGNMENT = 16  # bytes: of a tensor map's addresses and strides


class Boxes(Protocol):
    """What says how an image is copied."""

    @property
    def shape(self) -> ConvShape: ...
    @property
    def box(self) -> Box: ...
    @property
    def reuse(self) -> bool: ...


class Maps(ctypes.Structure):
    """plantune::ConvMaps."""

    _fields_ = tuple((name, TensorMap) for name in ("x", "w", "y", "residual", "unshifted"))


class BlockMaps(Maps):
    """plantune::BlockMaps."""

    _fields_ = (("w2", TensorMap),)


@dataclass(frozen=True)
class Launch:
    """A bound convolution: where to copy from and to. All of it is read at each launch."""

    step: Step
    epilogue: ConvEpilogue
    design: Design
    frame: Frame
    weight: Callable[[], Tensor]
    scalars: Callable[[], ctypes.Structure]
    weight2: Callable[[], Tensor] | None = None  # of a second convolution

    def bound(self) -> Callable[[int], None]:
        kernel, design = Kernel(self.frame.built), self.design
        place = placing(self.step, self.epilogue, self.frame)
        kind: type[Maps] = Maps if self.weight2 is None else BlockMaps

        def launch(stream: int) -> None:
            x, *residual, copied = place(stream)
            maps = kind(x=image_map(x, design), **self._others())
            if residual:
                maps.residual = _output_map(residual[0], design)
            kernel.launch(
                stream,
                (design.blocks, 1, 1),
                design.threads,
                (maps, self.scalars()),
                shared_bytes=design.shared_bytes,
                cluster=(design.split_k, 1, 1),
                programmatic=not copied,
            )

        return launch

    def _others(self) -> dict[str, TensorMap]:
        """The maps of weights and outputs."""
        maps = {"w": weight_map(self.weight(), self.design.tile_n)}
        if self.weight2 is not None:
            maps["w2"] = weight_map(self.weight2(), self.design.tile_n)
        outputs = {"y": self.step.nodes[-1].name, "unshifted": self.epilogue.unshifted}
        for part, name in outputs.items():
            if name is not None:
                maps[part] = _output_map(self.frame.values[name], self.design)
        return maps


def images_read(epilogue: ConvEpilogue) -> tuple[str, ...]:
    """x, and the residual where there is one."""
    residual = (epilogue.residual,) if epilogue.residual is not None else ()
    return (epilogue.conv.inputs[0], *residual)


def placing_bytes(step: Step, epilogue: ConvEpilogue) -> int:
    """Room for images at addresses where no tensor map can begin."""
    return sum(aligned(step.types[name].size_bytes) for name in images_read(epilogue))


def placing(step: Step, epilogue: ConvEpilogue, frame: Frame) -> Callable[[int], tuple[Any, ...]]:
    """A call that gives each image where a tensor map can begin: itself, or a copy of it; and last
    whether one was copied.
    """
    assert frame.workspace is not None
    rooms, start = {}, 0
    for name in images_read(epilogue):
        rooms[name] = view_bytes(frame.workspace, start, step.types[name], "nhwc")
        start += aligned(step.types[name].size_bytes)

    def place(stream: int) -> tuple[Any, ...]:
        found = {name: frame.values[name] for name in rooms}
        copied = False
        for name, image in found.items():
            if image.data_ptr() % ALIGNMENT:
                with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                    found[name] = rooms[name].copy_(image)
                copied = True
        # A convolution may be added to its own input.
        return (*(found[name] for name in images_read(epilogue)), copied)

    return place


def image_map(x: Tensor, design: Boxes) -> TensorMap:
    shape, box = design.shape, design.box
    row = shape.c * x.element_size()
    if design.reuse:
        sides = (box.w + shape.s - 1, box.h + shape.r - 1)
    else:
        sides = (box.w * shape.stride[1], box.h * shape.stride[0])
    return tensor_map(
        word(x),
        x.data_ptr(),
        (shape.c, shape.w, shape.h, shape.n),
        (row, row * shape.w, row * shape.w * shape.h),
        (CHUNK, *sides, box.n),
        steps=(1, shape.stride[1], shape.stride[0], 1),
    )


def weight_map(packed: Tensor, tile_n: int) -> TensorMap:
    o, r, s, c = packed.shape
    row = c * packed.element_size()
    return tensor_map(
        word(packed),
        packed.data_ptr(),
        (c, r * s, o),
        (row, row * r * s),
        (CHUNK, 1, tile_n),
    )


def _output_map(y: Tensor, design: Design) -> TensorMap:
    """Of y, or of what is added to it: boxes of the channels that a block finishes."""
    shape, box = design.shape, design.box
    row = shape.o * y.element_size()
    channels = min(design.own, CHUNK)
    return tensor_map(
        word(y),
        y.data_ptr(),
        (shape.o, shape.q, shape.p, shape.n),
        (row, row * shape.q, row * shape.q * shape.p),
        (channels, *box),
        swizzle_bytes=channels * 2 if channels > 8 else 0,
    )


def word(tensor: Tensor) -> str:
    """What a tensor map calls its elements."""
    return "float16" if tensor.dtype == torch.float16 else "bfloat16"
