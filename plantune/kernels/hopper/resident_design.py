"""Tiles and memory of a convolution whose weights stay in shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plantune.kernels.chips import measured_chip, measured_facts
from plantune.kernels.hopper.design import EpilogueSums, epilogue_members
from plantune.kernels.hopper.products import ELEMENTS, product
from plantune.kernels.hopper.resident import TILE_O
from plantune.kernels.hopper.tiles import (
    ROW_BYTES,
    SWIZZLE_BYTES,
    Box,
    ConvShape,
    PoolGather,
    copied_pixels,
)
from plantune.kernels.patterns.epilogue import ConvEpilogue, Sum
from plantune.kernels.patterns.expression import functors
from plantune.kernels.rendering import struct

WARPGROUP = 128
# Sums of more pixels, and what is added to them, leave no registers.
ROWS_MAX = 16
MANY_GROUPS = 3  # so many share registers: a thread has 128
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


def _whole(size_bytes: int) -> int:
    """With what is left of the last rows of a swizzle."""
    return -(-size_bytes // SWIZZLE_BYTES) * SWIZZLE_BYTES
