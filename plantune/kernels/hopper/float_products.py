"""How products of float32 are made of what Hopper's tensor cores multiply."""

from __future__ import annotations

from typing import ClassVar

from plantune.graph.step import Step
from plantune.kernels.family import Arch, Attrs
from plantune.kernels.hopper.elements import Elements
from plantune.kernels.hopper.family import COSTS, WarpgroupParts
from plantune.kernels.hopper.pipelined import PipelinedConv
from plantune.kernels.patterns.other_step import float32_precision

# Of a float three factors of bfloat16 make six products, as exact as float32.
PLANES = 3
# Factors, and how many of them a float becomes.
MATHS = {"tf32": ("float32", 0), "planes": ("bfloat16", PLANES)}


class FloatProducts(PipelinedConv):
    """Config: by `math` float32 is rounded to tf32, where torch's settings allow that, or becomes
    planes of bfloat16.
    """

    mixes_types: ClassVar = False
    multiplies: ClassVar = ("float32",)
    # Planes are made in each pass, from any strides.
    reads_channels_last: ClassVar = False

    def elements(self, parts: WarpgroupParts, config: Attrs) -> Elements:
        factor, planes = MATHS[str(config["math"])]
        return Elements.of(parts, factor, planes)

    def why_not_config(self, parts: WarpgroupParts, config: Attrs, arch: Arch) -> str | None:
        return why_not_math(parts.step, config) or super().why_not_config(parts, config, arch)

    def estimate_us(self, parts: WarpgroupParts, config: Attrs, arch: Arch) -> float:
        """With what a pass does to filters: a launch for all of them, after which the first kernel
        waits.
        """
        design = self.design(parts, config)
        packed = design.elements.planes or design.reversed
        # It reads 4 bytes of an element, and writes 2 of each plane, or 4.
        moved = 1 + (design.elements.planes or 2) / 2 if packed else 0
        packed_bytes = moved * parts.step.types[parts.weight].size_bytes
        packs_us = packed_bytes / arch.cost(COSTS)["packed_bytes_per_us"]
        return super().estimate_us(parts, config, arch) + packs_us


def why_not_math(step: Step, config: Attrs) -> str | None:
    """Why products may not be rounded so, by torch's settings, or None if they may."""
    precision = float32_precision(step)
    if config["math"] == "tf32" and precision != "tf32":
        return f"torch multiplies float32 in {precision}, not in tf32"
    return None
