"""The tile of a convolution on Hopper: what a block takes, and the kernel's constants."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plantune.kernels.chips import measured_chip, measured_facts
from plantune.kernels.cuda.launcher import Launcher
from plantune.kernels.family import Binding, Frame
from plantune.kernels.hopper.elements import Elements, size_of
from plantune.kernels.hopper.products import plane_product, product
from plantune.kernels.hopper.tiles import (
    CHUNK,
    NO_POOL,
    ROW_BYTES,
    SWIZZLE_BYTES,
    Box,
    ConvShape,
    PoolGather,
    copied_pixels,
)
from plantune.kernels.patterns.epilogue import ConvEpilogue, Sum
from plantune.kernels.patterns.expression import Chain, expression, functors
from plantune.kernels.rendering import cxx_bool, struct
from plantune.kernels.weights.constants import Constant

THREADS, AT_ONCE = 512, 8
SOURCE = """extern "C" __global__ void __launch_bounds__({threads})
    add(const float* parts, Kernel::Parts::Results results) {{
  static_assert(Kernel::Parts::kThreads == {threads}, "what is launched is what was planned");
  Kernel::Parts::add(parts, results);
}}
"""


@dataclass(frozen=True)
class EpilogueSums:
    """The sums of a kernel whose blocks leave parts of them: `tiles` of each channel's, each in
    `tile_parts` parts of all.
    """

    sums: tuple[Sum, ...]
    tiles: int
    tile_parts: int
    channels: int

    @property
    def source(self) -> str:
        """The source of the kernel that adds the parts; it follows the main one."""
        return SOURCE.format(threads=THREADS) if self.sums else ""

    @property
    def part_bytes(self) -> int:
        return (
            4
            * self.tiles
            * sum(self.channels if added.of_channels else self.tile_parts for added in self.sums)
        )

    def added(
        self,
        first: Callable[[int], None],
        frame: Frame,
        parts: int,
        constants: tuple[Constant, ...],
    ) -> Binding:
        """A kernel, and what then adds the parts at that address."""
        if not self.sums:
            return Binding(first, constants=constants)
        return Binding.in_halves(first, self._adder(frame, parts), constants)

    def _adder(self, frame: Frame, parts: int) -> Callable[[int], None]:
        most = max(self.channels if added.of_channels else 1 for added in self.sums)
        blocks = (math.ceil(most / AT_ONCE), len(self.sums))
        add = Launcher(frame.built, blocks, THREADS, name="add")
        results = ctypes.c_void_p * (len(self.sums) + 1)

        def launch(stream: int) -> None:
            addresses = [frame.values[added.name].data_ptr() for added in self.sums]
            add.launch(stream, ctypes.c_void_p(parts), results(*addresses))

        return launch


def sums_type(sums: tuple[Sum, ...], *, as_floats: bool = False) -> str:
    """The type of `csrc/cuda/hopper_sums.h`; results are floats, or have the kernel's T."""
    ends = ", true>" if as_floats else ">"
    kinds = ((expression(added.chain), cxx_bool(added.of_channels)) for added in sums)
    types = (f"plantune::SumOf<{chain}, {of_channels}{ends}" for chain, of_channels in kinds)
    return f"plantune::SumsOf<{', '.join(types)}>"


def epilogue_members(
    epilogue: ConvEpilogue, pool: PoolGather | None, *, float_sums: bool = False
) -> dict[str, Any]:
    """The members of the struct Conv for what follows the products."""
    parts = ("scale", "bias", "unshifted")
    return {
        **{f"k{part.title()}": getattr(epilogue, part) is not None for part in parts},
        **(NO_POOL if pool is None else pool.members),
        "Expression": expression(epilogue.chain),
        "Unshifted": expression(epilogue.unshifted_chain),
        "Sums": sums_type(epilogue.sums, as_floats=float_sums),
    }


# Registers that the assembler gives a thread, by the channels of a tile; where floats become so
# many planes, there are factors of two steps in them, and sums of one.
REGISTERS: Mapping[int, Mapping[int, int]] = {
    0: {64: 64, 128: 104, 256: 168},
    1: {64: 88, 128: 128, 256: 200},
    3: {64: 112, 128: 192, 256: 336},
}
KERNEL = """using Kernel = plantune::{kernel}<Conv>;
static_assert(Kernel::kThreads == {threads} && Kernel::kSharedBytes == {shared_bytes},
              "what is launched is what was planned");
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, {blocks_per_sm})
    run(const __grid_constant__ plantune::{maps} maps,
        const __grid_constant__ plantune::{scalars} scalars) {{
  Kernel::run(maps, scalars);
}}
"""


@dataclass(frozen=True)
class Design:
    """A convolution's tile, and what it takes of a block. `stages` of weights are in flight."""

    shape: ConvShape
    box: Box
    tile_m: int
    tile_n: int
    stages: int
    split_k: int
    reuse: bool
    blocks_per_sm: int
    elements: Elements
    tile_bytes: int  # what leaves or is read of each channel of a pixel
    # After that, parts of shared memory: what each is aligned to, and its size.
    extra: tuple[tuple[int, int], ...] = ()
    transposed: bool = False  # weights are read along their other axis
    reversed: bool = False  # and from the last tap to the first
    pool: PoolGather | None = None  # whose gradient is the residual
    persistent: bool = False  # a block makes tiles until none is left

    @property
    def threads(self) -> int:
        """A warpgroup for each 64 rows, and two warps that copy, or three."""
        return 2 * self.tile_m + (96 if self.persistent else 64)

    @property
    def chunks(self) -> int:
        return -(-self.shape.c // self.elements.chunk)

    @property
    def steps(self) -> int:
        """The most steps of the reduction in a tile."""
        return self.chunks * self.shape.taps(self.box)[0]

    @property
    def usual_taps(self) -> float:
        """The taps of a tile; the mean over phases, which share the chip."""
        most, total = self.shape.taps(self.box)
        return most if self.shape.phases == (1, 1) else total / self.shape.tiles_of_image(self.box)

    @property
    def usual_steps(self) -> float:
        if self.shape.phases == (1, 1):
            return self.steps_of_block
        return self.chunks * self.usual_taps / self.split_k

    @property
    def steps_of_block(self) -> int:
        return -(-self.steps // self.split_k)

    @property
    def image_stages(self) -> int:
        """With reuse each copy lasts for many steps, so that two in flight are enough."""
        if not self.reuse:
            return self.stages
        return 1 if self.chunks == 1 else 2

    @property
    def image_bytes(self) -> int:
        if not self.reuse:
            return self.tile_m * ROW_BYTES
        pixels = copied_pixels(self.shape, self.box, reuse=True)
        return -(-pixels * ROW_BYTES // SWIZZLE_BYTES) * SWIZZLE_BYTES

    @property
    def filter_bytes(self) -> int:
        """What a step reads of filters."""
        return self.tile_n * self.elements.filter_row_bytes

    @property
    def own(self) -> int:
        """Channels that a block of a cluster finishes."""
        return self.tile_n // self.split_k

    @property
    def used_bytes(self) -> int:
        """Ring buffers; what leaves the tile; sums from the rest of the cluster; scales and biases;
        barriers; what a kernel adds; alignment.
        """
        ring = self.image_stages * self.image_bytes + self.stages * self.filter_bytes
        out = self.tile_bytes * self.tile_m * self.own
        if self.pool is not None:
            out += self.pool.shared_bytes(self.box, self.own, size_of(self.elements.residual))
        parts = (self.split_k - 1) * self.tile_m * self.own * 4
        barriers = 8 * (2 * (self.image_stages + self.stages) + (4 if self.persistent else 2))
        end = ring + out + parts + 2 * 4 * self.own + barriers
        for alignment, size in self.extra:
            end = -(-end // alignment) * alignment + size
        return end + SWIZZLE_BYTES

    @property
    def shared_floor(self) -> int:
        """Just enough that one block more than `blocks_per_sm` would not fit."""
        chip = measured_facts()
        share = chip.shared_memory_per_sm_bytes // (self.blocks_per_sm + 1)
        return share // 128 * 128 - chip.shared_memory_reserved_per_block_bytes + 128

    @property
    def shared_bytes(self) -> int:
        return max(self.used_bytes, self.shared_floor)

    @property
    def resident(self) -> int:
        """Blocks that an SM runs at once."""
        return self._room(self.shared_bytes)

    def _room(self, shared_bytes: int) -> int:
        """Blocks of so much shared memory that an SM has room for."""
        return measured_facts().resident(self.threads, self.registers, shared_bytes)

    @property
    def registers(self) -> int:
        """Of a thread."""
        return REGISTERS[self.elements.planes][self.tile_n]

    @property
    def tiles(self) -> int:
        """The number of tiles of pixels."""
        return self.shape.tiles(self.box)

    @property
    def blocks(self) -> int:
        return self.tiles * -(-self.shape.o // self.tile_n) * self.split_k

    @property
    def launched(self) -> int:
        """Blocks of the grid."""
        return min(self.blocks, measured_chip().multiprocessors) if self.persistent else self.blocks

    def sums(self, sums: tuple[Sum, ...]) -> EpilogueSums:
        """What its blocks add of these."""
        return EpilogueSums(sums, self.tiles, self.blocks // self.tiles, self.shape.o)

    def sum_bytes(self, sums: tuple[Sum, ...]) -> int:
        """Shared memory for what each warp adds."""
        return 4 * self.tile_m // 16 * sum(self.own if s.of_channels else 1 for s in sums)

    def why_not(self) -> str | None:
        """Why no block of this design can do its work, or None if it can."""
        crowded = self.blocks_per_sm > self._room(self.used_bytes)
        large = self.tile_m * self.tile_n > 128 * 256
        facts = measured_facts()
        many = self.registers * self.threads > facts.registers_per_sm
        many |= self.registers > facts.registers_per_thread_max
        outside = self.tile_n >= 2 * max(self.shape.o, CHUNK)
        steps = self.steps_of_block
        reasons = {
            "the sums of such a tile take more than 128 registers of each thread": large,
            f"{self.threads} threads of {self.registers} registers do not fit an SM": many,
            f"half of the tile's channels are outside of {self.shape.o}": outside,
            f"{self.steps} steps are too few for {self.split_k} blocks": self.split_k > self.steps,
            f"a block has no more than {steps} steps to load": self.stages > max(3, steps),
            f"{self.stages} stages are too few for {steps} steps": self.stages < min(3, steps),
            f"{self.blocks_per_sm} blocks of {self.used_bytes} bytes and {self.threads} threads do "
            "not fit an SM": crowded,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def constants(
        self,
        epilogue: ConvEpilogue,
        inner: Chain = (),
        *,
        float_sums: bool = False,
        **more: Any,
    ) -> str:
        """The product, functions, and the struct that the kernel is instantiated with; `more` are
        members of the kernel's own, which may name the functions of `inner`.
        """
        phases_h, phases_w = self.shape.phases
        conv = struct(
            "Conv",
            **self.elements.members,
            **self.shape.members,
            **{"kPhasesH": phases_h, "kPhasesW": phases_w},
            **{"kTileM": self.tile_m, "kTileN": self.tile_n, "kSplitK": self.split_k},
            **{"kImageStages": self.image_stages, "kWeightStages": self.stages},
            **{"kBoxW": self.box.w, "kBoxH": self.box.h, "kBoxN": self.box.n},
            kSharedFloor=self.shared_floor,  # keeps other blocks off the SM
            kReuse=self.reuse,
            kTransposed=self.transposed,
            kReversed=self.reversed,
            kPersistent=self.persistent,
            **epilogue_members(epilogue, self.pool, float_sums=float_sums),
            **more,
        )
        kind = plane_product if self.elements.planes else product
        before = kind(self.elements.factor, self.tile_n, transposed=self.transposed)
        return before + functors(epilogue.chain + inner) + conv

    def kernel(self, name: str, scalars: str, maps: str | None = None) -> str:
        """The kernel's instantiation, which holds what was planned against what it takes."""
        return KERNEL.format(
            kernel=name,
            maps=maps or f"ConvMaps<{math.prod(self.shape.phases)}>",
            scalars=scalars,
            threads=self.threads,
            shared_bytes=self.shared_bytes,
            blocks_per_sm=self.blocks_per_sm,
        )
