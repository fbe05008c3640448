"""Gradients of images on Hopper: `csrc/cuda/hopper_conv.h`, with weights along their other axis."""

from __future__ import annotations

from typing import ClassVar

from plantune.kernels.hopper.gradient import PipelinedGradient


class HopperDgrad(PipelinedGradient):
    """Config: see `PipelinedConv`."""

    name: ClassVar = "hopper_dgrad"


FAMILY = HopperDgrad()
