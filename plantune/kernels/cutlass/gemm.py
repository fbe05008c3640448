"""A convolution as a product of matrices: what of it a tile covers, and which tiles make sense."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from plantune.graph import Attrs, Step
from plantune.kernels.chips import measured_chip
from plantune.kernels.cuda.launcher import PROGRAMMATIC_FROM
from plantune.kernels.cutlass.main_loop import MainLoop
from plantune.space.arch import Arch, Chip

# CUTLASS counts pixels, and elements of one image, in 32 bits; a tile may reach beyond the last.
INDEX_MAX = 2**31 - 512
GRID_Y_MAX = 65535
SUM_BYTES = 4
# Every GPU that is worth a swizzle runs so many blocks at once.
RESIDENT_BLOCKS = 128
# The smallest tiles, which may reach far beyond a small matrix.
LEAST_TILE = (64, 64, 32)


@dataclass(frozen=True)
class Gemm:
    """A convolution as a product of matrices: m pixels, n output channels, channels * taps deep."""

    dtype: str
    m: int
    n: int
    channels: int
    filter: tuple[int, int]
    image_elements: tuple[int, int]

    @staticmethod
    def of(step: Step) -> Gemm:
        conv = step.nodes[0]
        x, w, y = (step.types[name] for name in (*conv.inputs, conv.name))
        elements = (math.prod(x.shape[1:]), math.prod(y.shape[1:]))
        m = y.shape[0] * y.shape[2] * y.shape[3]
        n, channels, rows, columns = w.shape
        return Gemm(conv.types[0].dtype, m, n, channels, (rows, columns), elements)

    @property
    def taps(self) -> int:
        return math.prod(self.filter)

    def tiles(self, config: Attrs) -> tuple[int, int]:
        return -(-self.m // config["tile_m"]), -(-self.n // config["tile_n"])


def why_not_channels(gemm: Gemm, vector: int) -> str | None:
    if gemm.channels % vector or gemm.n % vector:
        return f"{gemm.channels} channels in and {gemm.n} out; both must be multiples of {vector}"
    return None


def why_not_tile(gemm: Gemm, loop: MainLoop) -> str | None:
    """The next smaller tile does the same with less where half of this one is outside."""
    for size, tile, least, what in zip(
        (gemm.m, gemm.n, gemm.channels), loop.tile, LEAST_TILE, "mnk", strict=True
    ):
        if tile > least and tile >= 2 * size:
            return f"half of a tile_{what} of {tile} or more is outside of {size}"
    return None


def why_not_mode(config: Attrs) -> str | None:
    if config["split_k"] == 1 and config["split_mode"] != "serial":
        return "K is not split, so there is nothing to add up in parallel"
    return None


def why_not_split(gemm: Gemm, config: Attrs) -> str | None:
    parts = -(-gemm.channels // config["tile_k"])
    if config["split_k"] > parts:
        return f"K is split by channels, and {gemm.channels} have {parts} tiles"
    return why_not_mode(config)


def why_not_swizzle(gemm: Gemm, config: Attrs) -> str | None:
    rows, columns = gemm.tiles(config)
    if columns > GRID_Y_MAX:
        return f"{columns} columns of tiles are more than a grid has"
    if config["swizzle"] == 1:
        return None
    if config["swizzle"] > columns:
        return f"there are only {columns} columns of tiles"
    if rows * columns <= RESIDENT_BLOCKS:
        return f"all {rows * columns} tiles run at once, whatever their order"
    return None


def partial_bytes(gemm: Gemm, config: Attrs) -> int:
    """Partial sums of every slice, a whole tile each."""
    slices: int = config["split_k"]
    if slices == 1:
        return 0
    tile: int = config["tile_m"] * config["tile_n"]
    return slices * math.prod(gemm.tiles(config)) * tile * SUM_BYTES


def counters_of(gemm: Gemm, config: Attrs) -> int:
    """One for each tile whose slices must know the last of them."""
    if config["split_k"] == 1 or config["split_mode"] != "serial":
        return 0
    return math.prod(gemm.tiles(config))


# Beside its sums, a thread keeps fragments of both operands and addresses.
OTHER_REGISTERS = 140


def estimate_us(step: Step, gemm: Gemm, config: Attrs, arch: Arch, family: str) -> float:
    """Microseconds: arithmetic, waiting or memory, whichever is most, and the sum of slices."""
    cost, chip, here = arch.cost(family), arch.chip or measured_chip(), measured_chip()
    loop = MainLoop.of(config, gemm.dtype)
    slices: int = config["split_k"]
    blocks_per_sm = math.prod(gemm.tiles(config)) * slices / chip.multiprocessors
    iterations = gemm.taps * math.ceil(gemm.channels / (slices * loop.tile[2]))
    registers = math.ceil(math.prod(loop.tile[:2]) / loop.threads) + OTHER_REGISTERS
    resident = arch.gpu.resident(loop.threads, registers, loop.main_loop_bytes)
    waves = math.ceil(math.ceil(blocks_per_sm) / resident)
    # Blocks of one wave take what the fullest multiprocessor takes; more waves even that out.
    most = math.ceil(blocks_per_sm) if waves == 1 else blocks_per_sm
    busy = cost["block_us"] + most * iterations * _iteration_us(loop, cost, chip)
    loading = iterations * cost["load_us"] if loop.stages == 2 else 0.0
    waiting = waves * (cost["block_us"] + loading)
    bytes_per_us = cost["bytes_per_us"] * chip.memory_gb_per_s / here.memory_gb_per_s
    sums = 0.0
    if slices > 1:
        moved = 2 * partial_bytes(gemm, config) / bytes_per_us
        sums = cost[f"{config['split_mode']}_us"] + moved
    alone = 0.0 if arch.gpu.compute_capability >= PROGRAMMATIC_FROM else cost["alone_us"]
    busy = max(busy, waiting, step.traffic_bytes / bytes_per_us)
    return cost["launch_us"] + alone + busy + sums


def _iteration_us(loop: MainLoop, cost: Mapping[str, float], chip: Chip) -> float:
    """The arithmetic of one tile of K, alone on a multiprocessor."""
    operands = sum(cost["operand_rows"] / rows for rows in loop.warp)
    flops = 2.0 * math.prod(loop.tile)
    return flops * (1 + operands) / _flops_per_us(loop, cost, chip)


def _flops_per_us(loop: MainLoop, cost: Mapping[str, float], chip: Chip) -> float:
    """Products and sums of one multiprocessor; tf32 goes at half the rate of 16 bits."""
    here = measured_chip()
    if loop.math == "simt":
        share = (chip.fp32_tflops / chip.multiprocessors) / (
            here.fp32_tflops / here.multiprocessors
        )
        return cost["simt_flops_per_us"] * share
    share = min(chip.fp16_tflops / chip.multiprocessors / cost["mma_tflops"], 1)
    return cost["mma_flops_per_us"] * share / (2 if loop.math == "tf32" else 1)
