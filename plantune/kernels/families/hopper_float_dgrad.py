"""Gradients of float32 images on Hopper's tensor cores: `csrc/cuda/hopper_conv.h`."""

from __future__ import annotations

from typing import ClassVar

from plantune.kernels.hopper.float_products import FloatProducts
from plantune.kernels.hopper.gradient import PipelinedGradient


class HopperFloatDgrad(FloatProducts, PipelinedGradient):
    """Config: that of `hopper_float_conv`. Filters are packed once a pass: products read float32
    along the reduction alone.
    """

    name: ClassVar = "hopper_float_dgrad"


FAMILY = HopperFloatDgrad()
