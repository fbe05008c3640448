"""Convolutions of few channels, in groups or not, on tensor cores: `csrc/cuda/grouped_conv.h`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, Step, first_reason, refuse
from plantune.kernels.cuda.grouped_filters import CHECK, FEWEST, UNIT, Groups, packed_filters
from plantune.kernels.cuda.small_matrix import MMA_FROM
from plantune.kernels.cuda.warp_mma import DTYPES, why_not_elements
from plantune.kernels.family import Binding, Frame
from plantune.kernels.patterns.epilogue import channel_parts, conv_epilogue, epilogue_of
from plantune.kernels.patterns.other_step import as_convolution
from plantune.kernels.patterns.pooled_epilogue import before_the_pool
from plantune.kernels.patterns.tiled_conv import TiledConv, arguments
from plantune.kernels.weights.constants import Arrangement

REGISTERS = 64  # of a thread
PIXELS_MIN, PIXELS_MAX, POOLED_MAX = 16, 256, 640
WIDTH_MAX = 512
# Estimates were compared with times of groups up to this width.
GUESSED_MAX = 128
# Channels without groups: in, with filters of several taps and of one, and out. More are what
# warpgroups multiply.
FEW, FEW_OF_ONE_TAP, WIDE = 32, 48, 256


@dataclass(frozen=True)
class GroupedParts(TiledConv):
    """A convolution of groups that fit the products of tensor cores."""

    groups: Groups
    few: int = 0  # channels of the image, if taps are taken by twos
    pool: bool = False  # whether a max pool follows

    def made(self, config: Attrs) -> Attrs:
        """The tile with its `rows` and `columns` of the convolution."""
        if not self.pool:
            return config
        return Attrs(config, **{word: 2 * int(config[word]) + 1 for word in ("rows", "columns")})

    @property
    def units(self) -> int:
        """What products read of the filters of a group, in words."""
        rows, columns = self.filter
        return rows * -(-columns // 2) if self.few else rows * columns * self.groups.inputs // UNIT

    def shared_bytes(self, config: Attrs) -> int:
        """What a tile reads, and what it makes."""
        inputs, outputs = (
            self.groups.slab * channels // UNIT | 1
            for channels in (self.groups.inputs, self.groups.outputs)
        )
        config = self.made(config)
        pixels = int(config["rows"]) * int(config["columns"])
        return vector_kernel.VECTOR_BYTES * (
            math.prod(self.read(config)) * inputs + pixels * outputs
        )

    def copied_bytes(self, config: Attrs) -> int:
        """What a block reads and writes."""
        groups, pixels = self.groups, int(config["rows"]) * int(config["columns"])
        images = 1 if self.epilogue.residual is None else 2
        inputs = self.few or groups.inputs
        read = math.prod(self.read(self.made(config))) * inputs
        moved = pixels * groups.outputs * images
        return (read + moved) * groups.slab * 2

    def products(self, config: Attrs) -> int:
        """Rows of 16 pixels times steps of 16 values that a warp takes one after the other."""
        config, groups, tiles = self.made(config), self.groups, self.groups.outputs // UNIT
        wide = next(n for n in (4, 3, 2, 1) if tiles % n == 0)
        rows = -(-int(config["rows"]) * int(config["columns"]) // 16)
        most, warps = min(2 if wide > 2 else 4, rows), int(config["threads"]) // 32

        def of_warp(high: int) -> int:
            return -(-groups.slab * (tiles // wide) * -(-rows // high) // warps) * high

        # Of a pool's odd tiles, each warp makes about as many.
        high = min(range(most, 0, -1), key=of_warp) if self.pool else most
        return of_warp(high) * -(-self.units // 2)

    def blocks(self, config: Attrs) -> tuple[int, int]:
        images, _, rows, columns = self.step.types[self.y].shape
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
        step = as_convolution(step) if step.ops[0] == "conv2d" else step
        nodes = before_the_pool(step)
        pool = nodes != step.nodes
        epilogue = epilogue_of(step, nodes) if pool else conv_epilogue(step)
        attrs, weight = epilogue.conv.attrs, step.types[epilogue.conv.inputs[1]]
        count = attrs["groups"]
        inputs, outputs = weight.shape[1], weight.shape[0] // count
        few = inputs if count == 1 and inputs <= FEWEST else 0
        groups = Groups(1, UNIT, outputs, 1) if few else Groups.of(count, inputs, outputs)
        most = FEW if math.prod(weight.shape[2:]) > 1 else FEW_OF_ONE_TAP
        refuse(
            {
                "only convolutions in groups of some channels": inputs == 1 and count > 1,
                "only a scale, a bias and functions may be before a pool": pool
                and (epilogue.residual is not None or epilogue.offset is not None),
                f"without groups it is for up to {most} channels in and {WIDE} out": count == 1
                and (inputs > most or outputs > WIDE),
                f"groups of {inputs} channels in and {outputs} out, or some of them together, are "
                f"not multiples of {UNIT}": groups.inputs % UNIT or groups.outputs % UNIT,
                f"it is for groups of up to {WIDTH_MAX} channels": count > 1
                and max(inputs, outputs) > WIDTH_MAX,
                "only without dilation": attrs["dilation"] != (1, 1),
                f"tensor cores take {' and '.join(DTYPES)} here, not {weight.dtype}": weight.dtype
                not in DTYPES,
                "there is nothing to compute": 0 in epilogue.conv.types[0].shape,
            }
        )
        return GroupedParts(step, epilogue, groups, few, pool)

    def why_not_config(self, parts: GroupedParts, config: Attrs, arch: Arch) -> str | None:
        made, most = parts.made(config), POOLED_MAX if parts.pool else PIXELS_MAX
        pixels = int(made["rows"]) * int(made["columns"])
        return (
            first_reason(
                {
                    **parts.too_large(made),
                    f"a tile has {PIXELS_MIN} to {most} pixels, not {pixels}": not PIXELS_MIN
                    <= pixels
                    <= most,
                }
            )
            or why_not_elements(parts.dtype, arch)
            or super().why_not_config(parts, config, arch)
        )

    def can_be_guessed(self, parts: GroupedParts, config: Attrs) -> bool:
        width = max(parts.groups.inputs, parts.groups.outputs)
        return parts.groups.count == 1 or width <= GUESSED_MAX

    def shared_bytes(self, parts: GroupedParts, config: Attrs, arch: Arch) -> int:
        return parts.shared_bytes(config)

    def source(self, parts: GroupedParts, config: Attrs, arch: Arch) -> str:
        groups, check = parts.groups, CHECK.format(parts.shared_bytes(config))
        made = parts.made(config)
        conv = parts.struct(
            config,
            kGroups=groups.count,
            kGroupC=groups.inputs,
            kGroupO=groups.outputs,
            kSlab=groups.slab,
            kTileP=made["rows"],
            kTileQ=made["columns"],
            kFew=parts.few,
            kPool=parts.pool,
        )
        entries = check + vector_kernel.ENTRIES
        kernel = "GroupedConv<Conv, true>" if parts.pool else "GroupedConv<Conv>"
        return vector_kernel.source(self.name, kernel, config["threads"], conv, entries)

    def bind(self, parts: GroupedParts, config: Attrs, frame: Frame) -> Binding:
        blocks, threads = parts.blocks(config), int(config["threads"])
        kernel = vector_kernel.VectorKernel(
            frame.built, blocks, threads, parts.shared_bytes(config)
        )
        return parts.bind(frame, kernel, _Arguments, _constants(parts))

    def estimate_us(self, parts: GroupedParts, config: Attrs, arch: Arch) -> float:
        """Blocks wait for their tile, then each warp for its products, one after the other; those
        that share a multiprocessor share what it copies.
        """
        assert arch.chip is not None
        cost, sms, threads = arch.cost(self.name), arch.chip.multiprocessors, int(config["threads"])
        resident = arch.gpu.resident(threads, REGISTERS, parts.shared_bytes(config))
        blocks = math.prod(parts.blocks(config)) / sms
        waves = max(1.0, blocks / resident, (blocks / resident + math.ceil(blocks / resident)) / 2)
        copied = min(resident, max(1.0, blocks)) * parts.copied_bytes(config)
        busy = max(copied / cost["sm_bytes_per_us"], parts.products(config) / cost["warp_per_us"])
        return cost["launch_us"] + waves * (cost["block_us"] + busy) * self.slowdown(parts, arch)


class _Arguments(ctypes.Structure):
    """plantune::GroupedConv::Arguments."""

    _fields_ = arguments()


def _constants(parts: GroupedParts) -> Mapping[str, tuple[str | None, Arrangement]]:
    """The filters as the products read them, and numbers of each channel."""
    packed = packed_filters(parts.step, parts.weight, parts.groups, bool(parts.few))
    return {"w": (parts.weight, packed), **channel_parts(parts.step, parts.epilogue)}


FAMILY = GroupedConv()
