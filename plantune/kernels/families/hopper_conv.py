"""Convolutions on Hopper's tensor copies and warpgroup products: `csrc/cuda/hopper_conv.h`."""

from __future__ import annotations

from typing import ClassVar

from plantune.kernels.hopper.pipelined import PipelinedConv


class HopperConv(PipelinedConv):
    """Config: see `PipelinedConv`."""

    name: ClassVar = "hopper_conv"


FAMILY = HopperConv()
