"""Convolutions whose weights stay in shared memory: `csrc/cuda/resident_conv.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from plantune.cuda.driver import TensorMap
from plantune.cuda.kernel import Kernel
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels.family import Binding, Frame
from plantune.kernels.hopper.design import SWIZZLE_BYTES
from plantune.kernels.hopper.family import (
    MEMORY_BYTES_PER_US,
    SM_CYCLES_PER_US,
    SMS,
    WarpgroupFamily,
    why_not_conv,
)
from plantune.kernels.hopper.launch import image_map, placing, placing_bytes, weight_map
from plantune.kernels.hopper.products import ELEMENTS, product
from plantune.kernels.hopper.tiles import ROW_BYTES, Box, ConvShape, conv_shape
from plantune.kernels.patterns.epilogue import ConvEpilogue, conv_epilogue
from plantune.kernels.vector_kernel import members
from plantune.space.arch import Arch
from plantune.values import Attrs

WARPGROUP, TILE_O = 128, 64
# Sums of more pixels, and what is added to them, leave no registers.
ROWS_MAX = 16
# Of what is read and written, so much moves beside the products (H200, 2026-11-20).
CACHED_BYTES = 50e6
SOURCE = """#include "cuda/resident_conv.h"
{product}struct Conv {{
  using T = {element};
  static constexpr int kN = {n}, kC = {c}, kO = {o}, kP = {p}, kQ = {q}, kR = {r}, kS = {s};
  static constexpr int kPadH = {padding[0]}, kPadW = {padding[1]};
  static constexpr int kBoxH = {box_h}, kSlots = {stages}, kGroups = {groups};
  static constexpr bool kBias = {bias}, kResidual = {residual}, kRelu = {relu};
}};
using Kernel = plantune::ResidentConv<Conv>;
static_assert(Kernel::kThreads == {threads} && Kernel::kSharedBytes == {shared_bytes},
              "what is launched is what was planned");
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1)
    run(const __grid_constant__ plantune::ResidentMaps maps,
        const __grid_constant__ Kernel::Arguments arguments) {{
  Kernel::run(maps, arguments);
}}
"""


class Maps(ctypes.Structure):
    """plantune::ResidentMaps."""

    _fields_ = (("x", TensorMap), ("w", TensorMap))


@dataclass(frozen=True)
class Design:
    """A convolution's tile, and what a block takes: `stages` boxes are in flight for each
    warpgroup.
    """

    epilogue: ConvEpilogue
    shape: ConvShape
    stages: int
    groups: int
    reuse: ClassVar = True  # a box is copied with its margin

    @staticmethod
    def of(step: Step, config: Attrs) -> Design:
        epilogue = conv_epilogue(step)
        groups = config["threads"] // WARPGROUP
        return Design(epilogue, conv_shape(step, epilogue), config["stages"], groups)

    @property
    def box(self) -> Box:
        """The tile of the fewest rows that divides the image's as evenly as few tiles can."""
        tiles = -(-self.shape.p // ROWS_MAX)
        return Box(8, -(-self.shape.p // tiles), 1)

    @property
    def tiles_o(self) -> int:
        return -(-self.shape.o // TILE_O)

    @property
    def threads(self) -> int:
        """Warpgroups that multiply, and a warp that copies."""
        return WARPGROUP * self.groups + 32

    @property
    def blocks(self) -> int:
        """One for each multiprocessor; those of one tile of channels share its tiles of pixels."""
        return max(min(SMS // self.tiles_o, self.shape.tiles(self.box)), 1) * self.tiles_o

    @property
    def shared_bytes(self) -> int:
        shape, box = self.shape, self.box
        weights = shape.chunks * shape.r * shape.s * TILE_O * ROW_BYTES
        pixels = (box.w + shape.s - 1) * (box.h + shape.r - 1)
        slot = -(-pixels * ROW_BYTES // SWIZZLE_BYTES) * SWIZZLE_BYTES
        slots = self.groups * self.stages
        return weights + slots * slot + 8 * (2 * slots + 1) + SWIZZLE_BYTES

    def source(self, dtype: str) -> str:
        columns, element = 8 * self.box.h, ELEMENTS[dtype]
        epilogue = self.epilogue
        flags = {
            "bias": epilogue.bias is not None,
            "residual": epilogue.residual is not None,
            "relu": epilogue.relu,
        }
        return SOURCE.format(
            product=product(dtype, columns),
            element=element,
            box_h=self.box.h,
            **vars(self.shape),
            **{key: getattr(self, key) for key in ("stages", "groups", "threads", "shared_bytes")},
            **{key: str(flag).lower() for key, flag in flags.items()},
        )


class ResidentConv(WarpgroupFamily):
    """Config: the warpgroups of `threads` take turns, with `stages` boxes of pixels each."""

    name: ClassVar = "resident_conv"

    def design(self, step: Step, config: Attrs) -> Design:
        return Design.of(step, config)

    def why_not_step(self, step: Step) -> str | None:
        try:
            epilogue = conv_epilogue(step)
        except IllegalCandidate as reason:
            return str(reason)
        if epilogue.scale is not None or epilogue.offset is not None:
            return "a bias, a residual and ReLU are all that may stand behind the convolution"
        return why_not_conv(step, epilogue) or _why_not_shape(conv_shape(step, epilogue))

    def workspace_bytes(self, step: Step, config: Attrs) -> int:
        return placing_bytes(step, conv_epilogue(step))

    def source(self, step: Step, config: Attrs, arch: Arch) -> str:
        return Design.of(step, config).source(step.types[step.nodes[0].inputs[0]].dtype)

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        design, values = Design.of(step, config), frame.values
        y = values[step.nodes[-1].name]
        packed = Packed(design, y.dtype, frame.device)
        kernel, place = Kernel(frame.built), placing(step, design.epilogue, frame)
        weights = weight_map(packed.weight, TILE_O)

        def launch(stream: int) -> None:
            x, *residual, copied = place(stream)
            added = residual[0].data_ptr() if residual else 0
            kernel.launch(
                stream,
                (design.blocks, 1, 1),
                design.threads,
                (
                    Maps(x=image_map(x, design), w=weights),
                    members(packed.bias.data_ptr(), added, y.data_ptr()),
                ),
                shared_bytes=design.shared_bytes,
                programmatic=not copied,
            )

        return Binding(launch, lambda: packed.refresh(values))

    def estimate_us(self, step: Step, config: Attrs) -> float:
        """Products of an SM's tiles, its last tile alone, and what the cache does not hold."""
        design = Design.of(step, config)
        shape, box = design.shape, design.box
        tiles = -(-shape.tiles(box) * design.tiles_o // design.blocks)
        products = shape.chunks * shape.r * shape.s * 4 * (4 * box.h)
        busy = (tiles * products * 1.25 + 4000) / SM_CYCLES_PER_US + 0.5 / design.stages
        moving = max(self.traffic_bytes(step) - CACHED_BYTES, 0) / MEMORY_BYTES_PER_US
        return self.launch_us + busy + moving


class Packed:
    """The weight with its channels in the order of products, and the bias in float32."""

    def __init__(self, design: Design, dtype: torch.dtype, device: torch.device) -> None:
        shape, self._epilogue = design.shape, design.epilogue
        channels = design.tiles_o * TILE_O
        sizes = (shape.r, shape.s, shape.c)
        self._outputs = shape.o
        self._wide = torch.zeros((channels, *sizes), dtype=dtype, device=device)
        self.weight = torch.zeros((channels, *sizes), dtype=dtype, device=device)
        self.bias = torch.zeros(channels, device=device)

    def refresh(self, values: Mapping[str, Any]) -> None:
        weight, o = values[self._epilogue.conv.inputs[1]], self._outputs
        self._wide[:o].copy_(weight.permute(0, 2, 3, 1))
        rows = self._wide.view(-1, 8, 2, *self._wide.shape[1:])
        self.weight.view(-1, 2, 8, *self.weight.shape[1:]).copy_(rows.transpose(1, 2))
        if self._epilogue.bias is not None:
            self.bias[:o].copy_(values[self._epilogue.bias].flatten())


def _why_not_shape(shape: ConvShape) -> str | None:
    if shape.stride != (1, 1) or shape.r * shape.s == 1:
        return "only the taps of a larger kernel with stride 1 read the same pixels"
    if shape.n * shape.p * shape.q >= 1 << 31:
        return "tiles are counted in 31 bits"
    if ROWS_MAX * shape.q * shape.o >= 1 << 31:
        return "elements of a tile's rows are counted in 31 bits"
    return None


FAMILY = ResidentConv()
