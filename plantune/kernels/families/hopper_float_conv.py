"""Convolutions of float32 on Hopper's tensor cores: `csrc/cuda/hopper_conv.h`."""

from __future__ import annotations

from typing import ClassVar

from plantune.kernels.hopper.float_products import FloatProducts
from plantune.kernels.hopper.pipelined import PipelinedConv


class HopperFloatConv(FloatProducts, PipelinedConv):
    """Config: see `PipelinedConv`, and `math` as `FloatProducts` has it."""

    name: ClassVar = "hopper_float_conv"


FAMILY = HopperFloatConv()
