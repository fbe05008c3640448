"""A guess at the time of an implicit GEMM, by which a search orders what it measures.

Its constants are costs in search_spaces/cuda.toml, as measured; for other chips they are scaled by
their datasheets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from plantune.canonical import Attrs
from plantune.graph.step import Step
from plantune.kernels.chips import measured_chip
from plantune.kernels.cutlass.gemm import Gemm, partial_bytes
from plantune.kernels.cutlass.main_loop import MainLoop
from plantune.kernels.launcher import PROGRAMMATIC_FROM
from plantune.space.arch import Arch, Chip

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
