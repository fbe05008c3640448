"""Moves a guess from the chip whose kernels were measured to the chip of another arch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from plantune.space.arch import Arch, Chip, CudaFacts, load_arch

# The arch of the GPU on which the constants of CUDA families were measured.
MEASURED_ON = "sm90"


@cache
def measured_arch(kind: str) -> Arch:
    """The arch whose kernels were measured, of all that run on CPUs or on CUDA."""
    return load_arch("cpu" if kind == "cpu" else MEASURED_ON)


def measured_chip() -> Chip:
    chip = measured_arch("cuda").chip
    assert chip is not None
    return chip


def measured_facts() -> CudaFacts:
    """The limits of that GPU."""
    return measured_arch("cuda").gpu


def slowdown(flops: float, moved_bytes: float, dtypes: Iterable[str], arch: Arch) -> float:
    """How many times as long an arch's chip takes, if arithmetic and memory take turns.

    1 if nothing is known of the chip.
    """
    if arch.chip is None:
        return 1.0
    short = any(dtype.endswith("float16") for dtype in dtypes)
    there, here = (
        flops / (chip.fp16_tflops if short else chip.fp32_tflops)
        # TFLOP/s are FLOP a picosecond, GB/s bytes a nanosecond.
        + 1e3 * moved_bytes / chip.memory_gb_per_s
        for chip in (arch.chip, measured_chip())
    )
    return there / here if here else 1.0
