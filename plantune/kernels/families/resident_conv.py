"""Convolutions whose weights stay in shared memory: `csrc/cuda/resident_conv.h`."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import ClassVar

from plantune.devices.cuda.structs import fields
from plantune.kernels.chips import measured_chip, measured_facts
from plantune.kernels.cuda.launcher import Launcher
from plantune.kernels.family import Arch, Attrs, Binding, Frame, Step, refuse
from plantune.kernels.hopper import family as hopper
from plantune.kernels.hopper.design import EpilogueSums, epilogue_members
from plantune.kernels.hopper.launch import (
    beyond_copies,
    image_map,
    images_read,
    placing,
)
from plantune.kernels.hopper.products import ELEMENTS, product
from plantune.kernels.hopper.resident import TILE_O, maps_of, put_map, weight_map
from plantune.kernels.hopper.tiles import (
    ROW_BYTES,
    SWIZZLE_BYTES,
    Box,
    ConvShape,
    PoolGather,
    copied_pixels,
)
from plantune.kernels.patterns.epilogue import ConvEpilogue, ConvParts, Sum, conv_epilogue
from plantune.kernels.patterns.expression import functors
from plantune.kernels.rendering import struct
from plantune.kernels.weights.constants import (
    Constants,
    Parameter,
    channel_values,
    conv_weight,
    floats,
)

WARPGROUP = 128
# Sums of more pixels, and what is added to them, leave no registers.
ROWS_MAX = 16
MANY_GROUPS = 3  # so many share registers: a thread has 128
STRIDE_MAX = 2  # boxes of pixels for each 64 channels: as many as its square
# From so many tiles of a block on, copies of whole tiles bring and take away what the epilogue
# reads and writes: one tile alone would wait for them.
STAGED_FROM = 4
# By whether there are phases, and whether the epilogue's images are staged.
KERNELS = {
    (False, False): ("resident_conv", "ResidentConv"),
    (False, True): ("resident_staged", "ResidentStaged"),
    (True, False): ("resident_phases", "ResidentPhases"),
    (True, True): ("resident_phases_staged", "ResidentPhasesStaged"),
}
SOURCE = """using Kernel = plantune::{kernel}<Conv>;
static_assert(Kernel::kThreads == {threads} && Kernel::kSharedBytes == {shared_bytes},
              "what is launched is what was planned");
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1)
    run(const __grid_constant__ Kernel::Maps maps,
        const __grid_constant__ Kernel::Arguments arguments) {{
  Kernel::run(maps, arguments);
}}
"""


@dataclass(frozen=True)
class ResidentDesign:
    """A convolution's tile, and what a block takes: `stages` boxes are in flight for each
    warpgroup.
    """

    epilogue: ConvEpilogue
    shape: ConvShape
    stages: int
    groups: int
    flips: bool  # the last tap comes first

    @property
    def box(self) -> Box:
        """The tile of the fewest rows that divides the image's as evenly as few tiles can."""
        most = ROWS_MAX if self.groups < MANY_GROUPS else ROWS_MAX // 2
        tiles = -(-self.shape.phase_p // most)
        return Box(8, -(-self.shape.phase_p // tiles), 1)

    @property
    def tiles(self) -> int:
        """Tiles of pixels, those of all phases included."""
        return self.shape.tiles(self.box) // math.prod(self.shape.phases)

    @property
    def tiles_o(self) -> int:
        return -(-self.shape.o // TILE_O)

    @property
    def threads(self) -> int:
        """Warpgroups that multiply, a warp that copies boxes, and one for the tiles of each."""
        return WARPGROUP * self.groups + 32 * (1 + self.groups if self.staged else 1)

    @property
    def blocks(self) -> int:
        """One for each multiprocessor; those of one tile of channels share its tiles of pixels."""
        return (
            max(min(measured_chip().multiprocessors // self.tiles_o, self.tiles), 1) * self.tiles_o
        )

    def sums(self, sums: tuple[Sum, ...]) -> EpilogueSums:
        """What its warpgroups add of these."""
        rows = self.blocks // self.tiles_o * self.groups
        return EpilogueSums(sums, rows, self.tiles_o * 4, self.shape.o)

    @property
    def staged(self) -> int:
        """Images of a tile that each warpgroup has room for, of those that the epilogue reads and
        writes; 0 where threads read and write them in memory.
        """
        many = self.tiles * self.tiles_o >= STAGED_FROM * self.blocks
        fits = self._bytes(self._images) <= measured_facts().shared_memory_per_block_bytes
        return self._images if many and fits and self._has_room else 0

    @property
    def _has_room(self) -> bool:
        """In a phase there is room for one image in, one out, and the windows of a pool."""
        pooled = self.epilogue.pool is not None
        if self.shape.phases == (1, 1):
            return not pooled
        plain = "residual" not in self.epilogue.images or pooled
        return plain and not self.epilogue.unshifted

    @property
    def _images(self) -> int:
        """Results overwrite the images that were read; windows of a pool have their own room."""
        pooled = self.epilogue.pool is not None
        return max(len(self.epilogue.images) - pooled, 1 + bool(self.epilogue.unshifted))

    @property
    def kernel(self) -> tuple[str, str]:
        """Its header and name."""
        return KERNELS[self.shape.phases != (1, 1), self.staged > 0]

    @property
    def staged_bytes(self) -> int:
        """The bytes of a warpgroup's images."""
        return self._staged_bytes(self.staged)

    def _staged_bytes(self, images: int) -> int:
        pool, tile = self.epilogue.pool, 8 * self.box.h * ROW_BYTES
        windows = 0 if pool is None else PoolGather.of(pool).pixels(self.box) * ROW_BYTES
        return images * tile + windows if images else 0

    @property
    def shared_bytes(self) -> int:
        return self._bytes(self.staged)

    def _bytes(self, images: int) -> int:
        """With room for so many."""
        shape, groups = self.shape, self.groups
        weights = shape.chunks * shape.r * shape.s * TILE_O * ROW_BYTES
        pixels = copied_pixels(shape, self.box, reuse=True)
        slots = groups * self.stages
        boxes = slots * math.prod(shape.stride) * _whole(pixels * ROW_BYTES)
        staged = self._staged_bytes(images)
        staged += (groups - 1) * _whole(staged)
        barriers = 2 * slots + 1 + (2 * groups if images else 0)
        return weights + boxes + staged + 8 * barriers + SWIZZLE_BYTES

    def source(self, dtype: str) -> str:
        epilogue, (phases_h, phases_w) = self.epilogue, self.shape.phases
        pool = None if epilogue.pool is None else PoolGather.of(epilogue.pool)
        header, kernel = self.kernel
        conv = struct(
            "Conv",
            T=ELEMENTS[dtype],
            **self.shape.members,
            **{"kPhasesH": phases_h, "kPhasesW": phases_w},
            **{"kBoxH": self.box.h, "kSlots": self.stages, "kGroups": self.groups},
            **{"kBlocks": self.blocks, "kStaged": self.staged, "kStagedBytes": self.staged_bytes},
            kFlips=self.flips,
            **epilogue_members(epilogue, pool),
        )
        before = product(dtype, 8 * self.box.h) + functors(epilogue.chain) + conv
        sizes = {"threads": self.threads, "shared_bytes": self.shared_bytes}
        return f'#include "cuda/{header}.h"\n{before}' + SOURCE.format(kernel=kernel, **sizes)


class ResidentConv(hopper.ConvFamily[hopper.WarpgroupParts]):
    """Config: the warpgroups of `threads` take turns, with `stages` boxes of pixels each."""

    name: ClassVar = "resident_conv"
    flips: ClassVar = False

    def read(self, step: Step) -> hopper.WarpgroupParts:
        parts = hopper.WarpgroupParts(step, conv_epilogue(step, unshifted=True))
        self.require(parts)
        return parts

    def require(self, parts: hopper.WarpgroupParts) -> None:
        """Raises IllegalCandidate if a convolution of that shape has no config."""
        shape, kernel = parts.shape, (parts.shape.r, parts.shape.s)
        apart = any(size <= stride for size, stride in zip(kernel, shape.stride, strict=True))
        refuse(
            {
                **hopper.not_a_warpgroups(parts.step, parts.epilogue, shape),
                "only the taps of a larger kernel read the same pixels": kernel == (1, 1)
                or (apart and shape.stride != (1, 1)),
                f"only strides up to {STRIDE_MAX}, got {shape.stride}": max(shape.stride)
                > STRIDE_MAX,
                "tiles are counted in 31 bits": shape.n * shape.p * shape.q >= 1 << 31,
                "elements of a tile's rows are counted in 31 bits": ROWS_MAX * shape.q * shape.o
                >= 1 << 31,
            }
        )

    def design(self, parts: hopper.WarpgroupParts, config: Attrs) -> ResidentDesign:
        stages, groups = int(config["stages"]), int(config["threads"]) // WARPGROUP
        return ResidentDesign(parts.epilogue, parts.shape, stages, groups, self.flips)

    def source(self, parts: hopper.WarpgroupParts, config: Attrs, arch: Arch) -> str:
        design = self.design(parts, config)
        return design.source(parts.dtype) + design.sums(parts.epilogue.sums).source

    def bind(self, parts: hopper.WarpgroupParts, config: Attrs, frame: Frame) -> Binding:
        design = self.design(parts, config)
        constants = self.constants(parts, design, frame)
        place, words = placing(parts, frame), tuple(parts.epilogue.images)
        room = beyond_copies(parts.step, images_read(parts), frame)
        names = {"y": parts.y, "unshifted": parts.epilogue.unshifted}
        kind = maps_of(design)
        kernel = Launcher(
            frame.built, design.blocks, design.threads, shared_bytes=design.shared_bytes
        )

        def launch(stream: int) -> None:
            x, *others, copied = place(stream)
            read = {word: image.data_ptr() for word, image in zip(words, others, strict=True)}
            arguments = constants.into(_Arguments, names, parts=room, **read)
            pixels = image_map(x, design.shape, design.box, reuse=True)
            maps = kind(x=pixels, w=weight_map(constants.tensor("w")))
            if design.staged:
                made = {word: frame.values[name] for word, name in names.items() if name}
                for what, image in (*made.items(), *zip(words, others, strict=True)):
                    put_map(maps, what, image, design)
            kernel.launch(stream, maps, arguments, programmatic=not copied)

        return design.sums(parts.epilogue.sums).added(launch, frame, room, constants.all)

    def estimate_us(self, parts: hopper.WarpgroupParts, config: Attrs, arch: Arch) -> float:
        """Products of an SM's tiles and its last tile alone, or what the cache does not hold, and
        images that threads read beside it: a warpgroup waits for these. With 2048 images of 64 x 16
        x 16 a gradient with a mask and sums took 75 us, 94 with a residual, too; staged 60 and 74
        (H200, 2026-11-23).
        """
        design, cost = self.design(parts, config), arch.cost(hopper.COSTS)
        shape, box = design.shape, design.box
        tiles = -(-design.tiles * design.tiles_o // design.blocks)
        products = shape.chunks * shape.r * shape.s * 4 * (4 * box.h)
        busy = (tiles * products * 1.25 + 4000) / cost["sm_cycles_per_us"]
        phases = shape.phases != (1, 1)
        if not phases:
            busy += tiles * cost["box_us"] / (design.stages * design.groups)
        if design.groups >= MANY_GROUPS:
            busy *= cost["many_staged"] if design.staged else cost["many_groups"]
        if design.staged:
            busy *= cost["staged"]
        moving = max(parts.step.traffic_bytes - cost["resident_cached_bytes"], 0)
        read = sum(parts.step.types[name].size_bytes for name in parts.epilogue.images.values())
        beside = 0.0 if design.staged else min(read, moving) / cost["bytes_per_us"]
        sums_us = cost["sums_us"] if parts.epilogue.sums else 0.0
        moving_us = moving / cost["bytes_per_us"]
        # A tile with phases holds all channels of its pixels before its first product.
        whole_us = busy + moving_us if phases else max(busy, moving_us)
        return cost["launch_us"] + whole_us + beside + sums_us

    def constants(self, parts: ConvParts, design: ResidentDesign, frame: Frame) -> Constants:
        return read_constants(parts, design, frame)


class _Arguments(ctypes.Structure):
    """ResidentConv::Arguments."""

    _fields_ = fields("scale bias residual saved y unshifted offset:one parts", one=Parameter)


def read_constants(parts: ConvParts, design: ResidentDesign, frame: Frame) -> Constants:
    """The filter as (O, R, S, C), and float32 scales and biases.

    A tile reads whole 16 channels: of a filter without them a copy is padded with zeros.
    """
    epilogue, o, rows = parts.epilogue, parts.outputs, design.tiles_o * TILE_O
    whole = o % 16 == 0
    weight = conv_weight(parts.step.types[parts.weight], 0 if whole else rows)
    offset = channel_values(parts.step.types[epilogue.offset or parts.weight], 1)
    return Constants(
        frame,
        {
            "w": (parts.weight, weight),
            "scale": (epilogue.scale, floats(o, rows)),
            "bias": (epilogue.bias, floats(o, rows)),
            "offset": (epilogue.offset, offset),
        },
    )


def _whole(size_bytes: int) -> int:
    """With what is left of the last rows of a swizzle."""
    return -(-size_bytes // SWIZZLE_BYTES) * SWIZZLE_BYTES


FAMILY = ResidentConv()
