"""Gradients of images on Hopper: `csrc/cuda/hopper_conv.h`, with weights along their other axis."""

from __future__ import annotations

from typing import ClassVar

from plantune.graph.step import Step
from plantune.kernels.hopper import family as hopper
from plantune.kernels.hopper.gradient import GradientParts, gradient_shape
from plantune.kernels.hopper.pipelined import PipelinedConv
from plantune.kernels.legality import not_within, refuse
from plantune.kernels.patterns.image_gradient import image_gradient

STRIDE_MAX = 2


class HopperDgrad(PipelinedConv):
    """Config: see `PipelinedConv`."""

    name: ClassVar = "hopper_dgrad"
    transposed: ClassVar = True

    def read(self, step: Step) -> GradientParts:
        epilogue = image_gradient(step)
        strides, padding = epilogue.conv.attrs["stride"], epilogue.conv.attrs["padding"]
        kernel = step.types[epilogue.conv.inputs[1]].shape[2:]
        image = step.types[epilogue.conv.name].shape[2:]
        small = any(size < stride for size, stride in zip(image, strides, strict=True))
        refuse(
            {
                f"only gradients of strides up to {STRIDE_MAX}, got {strides}": max(strides)
                > STRIDE_MAX,
                f"the image {image} is smaller than the stride {strides}": small,
                **not_within(padding, kernel),
                **hopper.not_a_warpgroups(step, epilogue, gradient_shape(step, epilogue)),
            }
        )
        return GradientParts(step, epilogue)


FAMILY = HopperDgrad()
