"""Convolutions on Hopper's tensor copies and warpgroup products: `csrc/cuda/hopper_conv.h`."""

from __future__ import annotations

from typing import ClassVar

from plantune.kernels.family import Step, refuse
from plantune.kernels.hopper.family import WarpgroupParts, not_a_warpgroups
from plantune.kernels.hopper.pipelined import PipelinedConv
from plantune.kernels.patterns.epilogue import conv_epilogue
from plantune.kernels.patterns.other_step import as_convolution


class HopperConv(PipelinedConv):
    """Config: see `PipelinedConv`."""

    name: ClassVar = "hopper_conv"

    def read(self, step: Step) -> WarpgroupParts:
        step = as_convolution(step)
        epilogue = conv_epilogue(step, unshifted=True)
        refuse(not_a_warpgroups(step, epilogue))
        return WarpgroupParts(step, epilogue)


FAMILY = HopperConv()
