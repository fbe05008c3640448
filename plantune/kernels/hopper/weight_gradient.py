"""The tile of a weight's gradient on Hopper: its boxes of pixels, and the kernel's constants."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, ClassVar, Self

from plantune.kernels.hopper import tiles
from plantune.kernels.hopper.products import ELEMENTS, FACTORS, register_product
from plantune.kernels.rendering import struct

# Channels and threads of a block that adds parts.
CHANNELS, THREADS = 32, 768


@dataclass(frozen=True)
class PartSum:
    """`parts` of the gradient of `o` by `c` channels and so many `taps`, in float32."""

    parts: int
    taps: int
    o: int
    c: int

    @property
    def vectors(self) -> int:
        """Vectors of four sums that a block makes of one row."""
        return self.taps * CHANNELS // 4

    @property
    def ways(self) -> int:
        """Threads that share an element."""
        return max(min(self.parts, THREADS // self.vectors), 1)

    @property
    def rows(self) -> int:
        """Where few parts are added, a block does so for several rows."""
        return max(THREADS // (self.vectors * self.ways) // 2, 1)

    @property
    def threads(self) -> int:
        return self.vectors * self.ways * self.rows

    @property
    def blocks(self) -> int:
        return -(-self.o // self.rows) * -(-self.c // CHANNELS)

    @property
    def bytes(self) -> int:
        """The memory of all parts."""
        return 4 * self.parts * self.taps * self.o * self.c

    @property
    def members(self) -> dict[str, int]:
        """What the header's class C says of them."""
        sums = {"kSumChannels": CHANNELS, "kSumWays": self.ways, "kSumRows": self.rows}
        return {**sums, "kSplitK": self.parts}


INCLUDE = '#include "cuda/hopper_wgrad.h"\n#include "cuda/wgrad_sum.h"\n'
# Registers of a thread by how many warpgroups multiply while one copies; those for other values.
REGISTERS, OTHER_REGISTERS = {1: 232, 2: 232, 3: 160}, 56
SOURCE = """using Kernel = plantune::{kernel}<Gradient>;
using Sum = plantune::WgradSum<Gradient>;
static_assert(Kernel::kThreads == {threads} && Kernel::kSharedBytes == {shared_bytes} &&
              Sum::kThreads == {sum.threads}, "what is launched is what was planned");
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1)
    run(const __grid_constant__ plantune::WgradMaps maps, float* sums, Gradient::Result* dw) {{
  Kernel::run(maps, sums, dw);
}}
extern "C" __global__ void __launch_bounds__(Sum::kThreads)
    sum(const float* sums, Gradient::Result* dw) {{
  Sum::run(sums, dw);
}}
"""


@dataclass(frozen=True)
class Cut:
    """How pixels are cut into boxes: with `inside`, the images of a place are neighbours."""

    shape: tiles.ConvShape
    box: tiles.Box
    inside: bool

    @property
    def pixels(self) -> int:
        return self.box.w * self.box.h * self.box.n

    @cached_property
    def phase(self) -> tuple[int, int]:
        """Columns and rows of the image, each stride-th, that a box reads."""
        shape, box = self.shape, self.box
        whole_w, whole_h = (
            self.inside and part >= size for part, size in ((box.w, shape.q), (box.h, shape.p))
        )
        return (
            _phase(box.w, shape.w, shape.s, shape.stride[1], shape.padding[1], whole=whole_w),
            _phase(box.h, shape.h, shape.r, shape.stride[0], shape.padding[0], whole=whole_h),
        )

    @property
    def boxes(self) -> int:
        return self.shape.tiles(self.box)

    @cached_property
    def tap_pixels(self) -> int:
        """Pixels of a box that are multiplied, of all taps."""
        shape, box = self.shape, self.box
        if not self.inside:
            return self.pixels * shape.r * shape.s
        rows = _reads(box.h, shape.p, shape.h, shape.r, shape.stride[0], shape.padding[0])
        columns = _reads(box.w, shape.q, shape.w, shape.s, shape.stride[1], shape.padding[1])
        return rows * columns * box.n

    @property
    def phase_bytes(self) -> int:
        pixels = self.phase[0] * self.phase[1] * self.box.n
        return -(-pixels * tiles.ROW_BYTES // tiles.SWIZZLE_BYTES) * tiles.SWIZZLE_BYTES

    @property
    def phases(self) -> int:
        shape = self.shape
        return min(shape.stride[0], shape.r) * min(shape.stride[1], shape.s)

    @property
    def can_be_copied(self) -> bool:
        sides = (self.phase[i] * self.shape.stride[1 - i] for i in range(2))
        return max(*sides, *self.box) <= tiles.BOX_SIDE_MAX


def _phase(part: int, size: int, kernel: int, stride: int, padding: int, *, whole: bool) -> int:
    """The most that is copied of a phase along one axis; `whole` leaves padding out."""
    if not whole:
        return part + (kernel - 1) // stride
    counts = []
    for phase in range(min(stride, kernel)):
        needed = part + (kernel - 1 - phase) // stride
        places = (i * stride + phase - padding for i in range(needed))
        counts.append(sum(0 <= place < size for place in places))
    return max(*counts, 1)


def _reads(part: int, outputs: int, size: int, kernel: int, stride: int, padding: int) -> int:
    """Pairs of places and taps along one axis that are multiplied."""
    if part < outputs:
        return part * kernel
    places = itertools.product(range(part), range(kernel))
    return sum(0 <= place * stride + tap - padding < size for place, tap in places)


@cache
def best_cut(shape: tiles.ConvShape, pixels: int, *, inside: bool) -> Cut | None:
    """The cut of at most so many pixels with the fewest products, then the fewest bytes."""
    cuts = _cuts(shape, pixels, inside=inside)
    fitting = (c for c in cuts if c.pixels <= pixels and c.pixels % 32 == 0 and c.can_be_copied)
    return min(fitting, key=_work, default=None)


def _work(cut: Cut) -> tuple[int, ...]:
    copied = cut.boxes * (cut.phase_bytes * cut.phases + cut.pixels * tiles.ROW_BYTES)
    return cut.boxes * cut.tap_pixels, copied, -cut.pixels, *cut.box


def _cuts(shape: tiles.ConvShape, pixels: int, *, inside: bool) -> Iterator[Cut]:
    step = 1 if inside else 8
    for w in range(step, min(-(-shape.q // step) * step, pixels) + 1, step):
        for h in range(1, min(shape.p, pixels // w) + 1):
            if inside:
                counts = [n for n in (16, 32, 64, 128, 256) if n * w * h <= pixels]
            else:
                counts = [pixels // (w * h)]
                counts += [n for n in (1, 2, 4) if n < counts[0]]
            yield from (Cut(shape, tiles.Box(w, h, n), inside) for n in counts)


@dataclass(frozen=True)
class WgradDesign:
    """A weight gradient's tile, and what it takes of a block."""

    cut: Cut
    tile_m: int
    tile_n: int
    stages: int
    split_k: int

    # Of tensor cores, for one of the gradient.
    products: ClassVar[int] = 1

    def shared_by(self, blocks: int) -> Self:
        """The design in which about so many blocks share the work."""
        return replace(self, split_k=max(min(blocks // self.tiles, self.cut.boxes), 1))

    @property
    def shape(self) -> tiles.ConvShape:
        return self.cut.shape

    @property
    def groups(self) -> int:
        """Warpgroups that multiply: one for each row of taps and 64 channels."""
        return self.shape.r * self.tile_m // tiles.CHUNK

    @property
    def threads(self) -> int:
        return (self.groups + 1) * 128

    @property
    def stage_bytes(self) -> int:
        dy = self.tile_m // tiles.CHUNK * self.cut.pixels * tiles.ROW_BYTES
        return dy + self.tile_n // tiles.CHUNK * self.cut.phases * self.cut.phase_bytes

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16) + tiles.SWIZZLE_BYTES

    @property
    def tiles(self) -> int:
        return -(-self.shape.o // self.tile_m) * -(-self.shape.c // self.tile_n)

    @property
    def blocks(self) -> int:
        return self.tiles * self.split_k

    @property
    def boxes_of_block(self) -> int:
        return -(-self.cut.boxes // self.split_k)

    @property
    def taps(self) -> int:
        return self.shape.r * self.shape.s

    @property
    def sum(self) -> PartSum:
        return PartSum(self.split_k, self.taps, self.shape.o, self.shape.c)

    @property
    def sums_bytes(self) -> int:
        """The bytes of the parts; a gradient in one part is stored directly."""
        return 0 if self.split_k == 1 else self.sum.bytes

    @property
    def sums_of_thread(self) -> int:
        return self.shape.s * self.tile_n // 2

    @property
    def registers_for_sums(self) -> int:
        return REGISTERS.get(self.groups, 0) - OTHER_REGISTERS

    def why_not(self) -> str | None:
        """Why no block of this design can do its work, or None if it can."""
        shape, sums, most = self.shape, self.sums_of_thread, self.registers_for_sums
        reasons = {
            f"{self.groups} warpgroups, no more than 3 have room": self.groups > 3,
            f"{sums} sums of each thread, no more than {most} have room": sums > most,
            f"half of the tile is outside of {shape.o} by {shape.c} channels": self.tile_m
            >= 2 * max(shape.o, tiles.CHUNK)
            or self.tile_n >= 2 * max(shape.c, tiles.CHUNK),
            f"a block has no more than {self.boxes_of_block} boxes to load": self.stages
            > max(2, self.boxes_of_block),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def source(self, factor: str, result: str, layout: str) -> str:
        """The kernels that multiply elements of one dtype and leave those of another."""
        gradient = self.gradient(ELEMENTS[factor], FACTORS[result], layout)
        return (
            INCLUDE + register_product(factor, self.tile_n) + gradient + self.kernels("HopperWgrad")
        )

    def gradient(self, factor: str, result: str, layout: str, **more: Any) -> str:
        """The struct that kernels are instantiated with."""
        box, (phase_w, phase_h) = self.cut.box, self.cut.phase
        return struct(
            "Gradient",
            T=factor,
            Result=result,
            **self.shape.members,
            **{"kTileM": self.tile_m, "kTileN": self.tile_n, "kStages": self.stages},
            **{"kBoxW": box.w, "kBoxH": box.h, "kBoxN": box.n},
            **{"kPhaseW": phase_w, "kPhaseH": phase_h},
            kImagesInside=self.cut.inside,
            kChannelsLast=layout == "nhwc",
            **self.sum.members,
            **more,
        )

    def kernels(self, kernel: str) -> str:
        own = {word: getattr(self, word) for word in ("threads", "shared_bytes", "sum")}
        return SOURCE.format(kernel=kernel, **own)
