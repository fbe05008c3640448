"""Convolutions whose weights stay in shared memory: `csrc/cuda/resident_conv.h`."""

from __future__ import annotations

from typing import ClassVar

from plantune.kernels.family import Step
from plantune.kernels.hopper.family import WarpgroupParts
from plantune.kernels.hopper.resident_family import ResidentFamily
from plantune.kernels.patterns.epilogue import conv_epilogue


class ResidentConv(ResidentFamily):
    """Config: see `ResidentFamily`."""

    name: ClassVar = "resident_conv"

    def read(self, step: Step) -> WarpgroupParts:
        parts = WarpgroupParts(step, conv_epilogue(step, unshifted=True))
        self.require(parts)
        return parts


FAMILY = ResidentConv()
