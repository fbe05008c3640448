"""A guess at the time of an implicit GEMM, by which a search orders what it measures.

The constants fit 900 times of one H200 (2026-11-20, CUDA graphs, float16) with a deviation of 11%:
the first choice by guess was the best, or at most 15% slower, on each of 12 convolutions. For
other chips they are scaled by their datasheets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plantune.canonical import Attrs
from plantune.graph.step import Step
from plantune.kernels.cutlass.gemm import Gemm, partial_bytes
from plantune.kernels.cutlass.main_loop import MainLoop
from plantune.space.arch import Arch

REGISTERS_PER_SM = 1 << 16
# Beside its sums, a thread keeps fragments of both operands and addresses.
OTHER_REGISTERS = 140
RESERVED_BYTES = 1024
# What a block takes before its first product and after its last.
BLOCK_US = 1.6
# Two stages ask for a tile of K only one product ahead; more hide all of it.
LOAD_US = 0.38
# Warps read both of their operands for each product: so many rows or columns take as long again.
OPERAND_ROWS = 27.6
# Adding the slices, beside moving their sums.
ADDING_US = {"serial": 1.9, "parallel": 0.4}
# Of one multiprocessor of the measured chip: what its datasheet says of products outside of tensor
# cores, and what its tensor cores do for instructions of this kind, less than its datasheet says.
SIMT_TFLOPS, MMA_TFLOPS = 67 / 132, 4.6
# Launches that cannot overlap the kernel in front take longer by this.
ALONE_US = 1.0


@dataclass(frozen=True)
class Rates:
    """What a chip does in a microsecond; as it stands, an H200."""

    multiprocessors: int = 132
    mma_flops: float = 5.7e6
    simt_flops: float = 6.8e5
    memory_bytes: float = 4.5e6
    shared_bytes: int = 228 << 10
    launch_us: float = 1.4

    @staticmethod
    def of(arch: Arch) -> Rates:
        """The rates of an arch's chip, by its datasheet."""
        here, facts, chip = Rates(), arch.cuda, arch.chip
        if facts is None or chip is None:
            return here
        mma = min(chip.fp16_tflops / chip.multiprocessors / MMA_TFLOPS, 1)
        simt = chip.fp32_tflops / chip.multiprocessors / SIMT_TFLOPS
        overlaps = facts.compute_capability >= (9, 0)
        return Rates(
            multiprocessors=chip.multiprocessors,
            mma_flops=here.mma_flops * mma,
            simt_flops=here.simt_flops * simt,
            memory_bytes=here.memory_bytes * chip.memory_gb_per_s / 4800,
            shared_bytes=facts.shared_memory_per_sm_bytes,
            launch_us=here.launch_us + (0 if overlaps else ALONE_US),
        )

    def flops(self, math_: str) -> float:
        """Products and sums of one multiprocessor; tf32 goes at half the rate of 16 bits."""
        tensor = self.mma_flops / (2 if math_ == "tf32" else 1)
        return self.simt_flops if math_ == "simt" else tensor


H200 = Rates()


def estimate_us(step: Step, config: Attrs, rates: Rates = H200) -> float:
    """Microseconds: arithmetic, waiting or memory, whichever is most, and the sum of slices."""
    gemm = Gemm.of(step)
    loop = MainLoop.of(config, gemm.dtype)
    slices: int = config["split_k"]
    blocks_per_sm = math.prod(gemm.tiles(config)) * slices / rates.multiprocessors
    iterations = gemm.taps * math.ceil(gemm.channels / (slices * loop.tile[2]))
    waves = math.ceil(math.ceil(blocks_per_sm) / _resident(loop, rates))
    # Blocks of one wave take what the fullest multiprocessor takes; more waves even that out.
    most = math.ceil(blocks_per_sm) if waves == 1 else blocks_per_sm
    busy = BLOCK_US + most * iterations * _iteration_us(loop, rates)
    waiting = waves * (BLOCK_US + (iterations * LOAD_US if loop.stages == 2 else 0.0))
    sums = 0.0
    if slices > 1:
        moved = 2 * partial_bytes(gemm, config) / rates.memory_bytes
        sums = ADDING_US[config["split_mode"]] + moved
    return rates.launch_us + max(busy, waiting, step.traffic_bytes / rates.memory_bytes) + sums


def _iteration_us(loop: MainLoop, rates: Rates) -> float:
    """The arithmetic of one tile of K, alone on a multiprocessor."""
    operands = sum(OPERAND_ROWS / rows for rows in loop.warp)
    flops = 2.0 * math.prod(loop.tile)
    return flops * (1 + operands) / rates.flops(loop.math)


def _resident(loop: MainLoop, rates: Rates) -> int:
    """Blocks that a multiprocessor has room for."""
    registers = math.prod(loop.tile[:2]) + OTHER_REGISTERS * loop.threads
    room = rates.shared_bytes // (loop.main_loop_bytes + RESERVED_BYTES)
    return max(1, min(REGISTERS_PER_SM // registers, room))
