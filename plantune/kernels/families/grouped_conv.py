"""Convolutions in groups of few channels, on tensor cores: `csrc/cuda/grouped_conv.h`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from plantune.canonical import Attrs
from plantune.graph.step import Step
from plantune.kernels import vector_kernel
from plantune.kernels.constants import Constants, Form, Parameter
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.family import Binding, Frame
from plantune.kernels.launcher import Launcher
from plantune.kernels.legality import first_reason, refuse
from plantune.kernels.patterns.epilogue import ConvParts, channel_parts, conv_epilogue
from plantune.kernels.patterns.expression import rendered
from plantune.kernels.rendering import cxx_bools
from plantune.kernels.small_matrix import MMA_FROM
from plantune.kernels.warp_mma import DTYPES, why_not_elements
from plantune.space.arch import Arch

UNIT = 8  # channels that one product reads of a pixel, and that it makes
SLAB = 64  # channels of a block, at least if there are so many: lines of 128 bytes
# Of a multiprocessor: registers leave room for so many threads.
SM_SHARED_BYTES, RESERVED_BYTES, SM_THREADS = 233472, 1024, 1024
PIXELS_MIN, PIXELS_MAX = 16, 256
WIDTH_MAX = 128
SOURCE = """#include "cuda/grouped_conv.h"
{functors}struct Conv {{
  using T = {element};
  using Expression = {expression};
  static constexpr int kH = {image[0]}, kW = {image[1]}, kP = {out[0]}, kQ = {out[1]};
  static constexpr int kGroups = {groups.count}, kGroupC = {groups.inputs};
  static constexpr int kGroupO = {groups.outputs}, kSlab = {groups.slab};
  static constexpr int kR = {filter[0]}, kS = {filter[1]};
  static constexpr int kStrideH = {stride[0]}, kStrideW = {stride[1]};
  static constexpr int kPadH = {padding[0]}, kPadW = {padding[1]};
  static constexpr int kTileP = {rows}, kTileQ = {columns}, kThreads = {threads};
  static constexpr bool kScale = {scale}, kBias = {bias};
}};
using Kernel = plantune::GroupedConv<Conv>;
static_assert(Kernel::kSharedBytes == {shared_bytes},
              "the launch asks for what the kernel uses");"""


@dataclass(frozen=True)
class Groups:
    """How channels are divided: `merged` groups of the network are one of the kernel's, whose
    products with each other are zero.
    """

    count: int
    inputs: int
    outputs: int
    merged: int

    @staticmethod
    def of(count: int, inputs: int, outputs: int) -> Groups:
        """Groups of so many channels each."""
        merged = UNIT // math.gcd(inputs, UNIT) if inputs < UNIT else 1
        merged = merged if count % merged == 0 else 1
        return Groups(count // merged, inputs * merged, outputs * merged, merged)

    @property
    def slab(self) -> int:
        """Groups of a block, such that all blocks have about as many."""
        blocks = -(-self.count * max(self.inputs, self.outputs) // SLAB)
        return -(-self.count // min(blocks, self.count))


@dataclass(frozen=True)
class GroupedParts(ConvParts):
    """A convolution of groups that fit the products of tensor cores."""

    groups: Groups

    @property
    def filter(self) -> tuple[int, int]:
        rows, columns = self.step.types[self.weight].shape[2:]
        return rows, columns

    def read(self, config: Attrs) -> int:
        """Pixels that a tile reads."""
        strides, tile = self.conv.attrs["stride"], (config["rows"], config["columns"])
        sizes = zip(tile, strides, self.filter, strict=True)
        return math.prod((int(size) - 1) * stride + taps for size, stride, taps in sizes)

    def shared_bytes(self, config: Attrs) -> int:
        """What a tile reads, and what it makes."""
        inputs, outputs = (
            self.groups.slab * channels // UNIT | 1
            for channels in (self.groups.inputs, self.groups.outputs)
        )
        pixels = int(config["rows"]) * int(config["columns"])
        return vector_kernel.VECTOR_BYTES * (self.read(config) * inputs + pixels * outputs)

    def copied_bytes(self, config: Attrs) -> int:
        """What a block reads and writes."""
        groups, pixels = self.groups, int(config["rows"]) * int(config["columns"])
        read, written = self.read(config) * groups.inputs, pixels * groups.outputs
        return (read + written) * groups.slab * 2

    def products(self, config: Attrs) -> int:
        """Rows of 16 pixels times steps of 16 values that a warp takes one after the other."""
        groups, tiles = self.groups, self.groups.outputs // UNIT
        wide = next(n for n in (4, 3, 2, 1) if tiles % n == 0)
        rows = -(-int(config["rows"]) * int(config["columns"]) // 16)
        high = min(2 if wide > 2 else 4, rows)
        items = groups.slab * (tiles // wide) * -(-rows // high)
        steps = -(-math.prod(self.filter) * groups.inputs // (2 * UNIT))
        return -(-items // (int(config["threads"]) // 32)) * steps * high

    def blocks(self, config: Attrs) -> tuple[int, int]:
        images, _, rows, columns = self.conv.types[0].shape
        tiles = -(-rows // int(config["rows"])) * -(-columns // int(config["columns"]))
        return images * tiles, -(-self.groups.count // self.groups.slab)


class GroupedConv(CudaFamily[GroupedParts]):
    """Config: a block makes so many `rows` and `columns` of pixels, with so many `threads`."""

    name: ClassVar = "grouped_conv"
    image_layout = "nhwc"

    def why_not_arch(self, arch: Arch) -> str | None:
        if arch.cuda is not None and arch.cuda.compute_capability < MMA_FROM:
            return f"{arch.name} has no products of 16 pixels with 16 channels"
        return super().why_not_arch(arch)

    def read(self, step: Step) -> GroupedParts:
        epilogue = conv_epilogue(step)
        attrs, weight = epilogue.conv.attrs, step.types[epilogue.conv.inputs[1]]
        count = attrs["groups"]
        inputs, outputs = weight.shape[1], weight.shape[0] // count
        groups = Groups.of(count, inputs, outputs)
        refuse(
            {
                "only convolutions in groups of some channels": count == 1 or inputs == 1,
                f"groups of {inputs} channels in and {outputs} out, or some of them together, are "
                f"not multiples of {UNIT}": groups.inputs % UNIT or groups.outputs % UNIT,
                f"it is for groups of up to {WIDTH_MAX} channels": max(inputs, outputs) > WIDTH_MAX,
                "only without dilation": attrs["dilation"] != (1, 1),
                f"tensor cores take {' and '.join(DTYPES)} here, not {weight.dtype}": weight.dtype
                not in DTYPES,
                "there is nothing to compute": 0 in epilogue.conv.types[0].shape,
            }
        )
        return GroupedParts(step, epilogue, groups)

    def why_not_config(self, parts: GroupedParts, config: Attrs, arch: Arch) -> str | None:
        _, _, rows, columns = parts.conv.types[0].shape
        pixels = int(config["rows"]) * int(config["columns"])
        return (
            first_reason(
                {
                    f"half of {config['rows']} rows hold all {rows}": config["rows"] >= 2 * rows,
                    f"half of {config['columns']} columns hold all {columns}": config["columns"]
                    >= 2 * columns,
                    f"a tile has {PIXELS_MIN} to {PIXELS_MAX} pixels, not {pixels}": not PIXELS_MIN
                    <= pixels
                    <= PIXELS_MAX,
                }
            )
            or why_not_elements(parts.dtype, arch)
            or super().why_not_config(parts, config, arch)
        )

    def shared_bytes(self, parts: GroupedParts, config: Attrs, arch: Arch) -> int:
        return parts.shared_bytes(config)

    def source(self, parts: GroupedParts, config: Attrs, arch: Arch) -> str:
        epilogue, attrs = parts.epilogue, parts.conv.attrs
        flags = {part: getattr(epilogue, part) is not None for part in ("scale", "bias")}
        return (SOURCE + vector_kernel.ENTRIES).format(
            element=vector_kernel.ELEMENTS[parts.dtype],
            image=parts.step.types[parts.x].shape[2:],
            out=parts.conv.types[0].shape[2:],
            groups=parts.groups,
            filter=parts.filter,
            stride=attrs["stride"],
            padding=attrs["padding"],
            shared_bytes=parts.shared_bytes(config),
            **config,
            **cxx_bools(flags),
            **rendered(epilogue.chain),
        )

    def bind(self, parts: GroupedParts, config: Attrs, frame: Frame) -> Binding:
        constants = Constants(frame, _constants(parts))
        images = {"x": parts.x, "residual": parts.epilogue.residual, "y": parts.y}
        how: Any = {"shared_bytes": parts.shared_bytes(config)}
        aligned, unaligned = (
            Launcher(frame.built, parts.blocks(config), int(config["threads"]), name=name, **how)
            for name in ("run", "run_unaligned")
        )
        x = parts.x

        def launch(stream: int) -> None:
            off = frame.values[x].data_ptr() % vector_kernel.VECTOR_BYTES
            (unaligned if off else aligned).launch(stream, constants.into(_Arguments, images))

        return Binding(launch, constants=constants.all)

    def estimate_us(self, parts: GroupedParts, config: Attrs, arch: Arch) -> float:
        """Blocks wait for their tile, then each warp for its products, one after the other; those
        that share a multiprocessor share what it copies.
        """
        assert arch.chip is not None
        cost, sms = arch.cost(self.name), arch.chip.multiprocessors
        by_memory = SM_SHARED_BYTES // (parts.shared_bytes(config) + RESERVED_BYTES)
        resident = max(1, min(by_memory, SM_THREADS // int(config["threads"])))
        blocks = math.prod(parts.blocks(config)) / sms
        waves = max(1.0, blocks / resident, (blocks / resident + math.ceil(blocks / resident)) / 2)
        copied = min(resident, max(1.0, blocks)) * parts.copied_bytes(config)
        busy = max(copied / cost["sm_bytes_per_us"], parts.products(config) / cost["warp_per_us"])
        return cost["launch_us"] + waves * (cost["block_us"] + busy) * self.slowdown(parts, arch)


class _Arguments(ctypes.Structure):
    """plantune::GroupedConv::Arguments."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("x", "w", "residual", "y")),
        *((name, Parameter) for name in ("scale", "bias", "offset")),
    ]


def _constants(parts: GroupedParts) -> Mapping[str, tuple[str | None, Form]]:
    """The filters as the products read them, and numbers of each channel."""
    groups, (rows, columns) = parts.groups, parts.filter
    steps = -(-rows * columns * groups.inputs // UNIT // 2)
    shape = (groups.count, groups.outputs // UNIT, steps, UNIT, 4, 2, 2)

    def packed(weight: Tensor) -> Tensor:
        return _by_lanes(weight, groups, shape)

    form = Form(shape, parts.step.types[parts.weight].torch_dtype, packed, packs=True)
    return {"w": (parts.weight, form), **channel_parts(parts.step, parts.epilogue)}


def _by_lanes(weight: Tensor, groups: Groups, shape: tuple[int, ...]) -> Tensor:
    """Lane 4 * o + t of a product brings values 2 * t and 2 * t + 1 of output o, of both units."""
    merged, taps = groups.merged, weight.shape[2] * weight.shape[3]
    outputs, inputs = groups.outputs // merged, groups.inputs // merged
    split = weight.reshape(groups.count, merged, outputs, 1, inputs, taps)
    own = torch.eye(merged, dtype=torch.bool, device=weight.device).view(merged, 1, merged, 1, 1)
    whole = torch.where(own, split, torch.zeros_like(split))
    whole = whole.reshape(groups.count, groups.outputs, groups.inputs, taps)
    units = whole.transpose(2, 3).reshape(groups.count, groups.outputs, -1, UNIT)
    units = pad(units, (0, 0, 0, units.shape[2] % 2))
    count, tiles, steps, *_ = shape
    parts = units.view(count, tiles, UNIT, steps, 2, 4, 2)
    return parts.permute(0, 1, 3, 2, 5, 4, 6)


FAMILY = GroupedConv()
