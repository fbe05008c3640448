"""Gradients of images on Hopper: `csrc/cuda/hopper_conv.h`, with weights along their other axis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from plantune.graph.step import Step
from plantune.kernels.families.hopper_conv import HopperConv
from plantune.kernels.hopper import family as hopper
from plantune.kernels.hopper.tiles import ConvShape
from plantune.kernels.legality import not_within, refuse
from plantune.kernels.patterns.epilogue import ConvEpilogue
from plantune.kernels.patterns.image_gradient import image_gradient

STRIDE_MAX = 2


@dataclass(frozen=True)
class GradientParts(hopper.WarpgroupParts):
    """The gradient of an image, as a convolution of the result's gradient."""

    @property
    def x(self) -> str:
        return self.conv.inputs[0]

    @property
    def y(self) -> str:
        """What the step makes beside sums."""
        sums = {added.name for added in self.epilogue.sums}
        return next(node.name for node in reversed(self.step.nodes) if node.name not in sums)

    @cached_property
    def shape(self) -> ConvShape:
        return gradient_shape(self.step, self.epilogue)


class HopperDgrad(HopperConv):
    """Config: that of `hopper_conv`."""

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


def gradient_shape(step: Step, epilogue: ConvEpilogue) -> ConvShape:
    """The convolution of the result's gradient that makes the image's."""
    dy, w = (step.types[name].shape for name in epilogue.conv.inputs)
    (n, o, p, q), (_, c, r, s) = dy, w
    height, width = step.types[epilogue.conv.name].shape[2:]
    pads: Any = epilogue.conv.attrs["padding"]
    padding = (r - 1 - pads[0], s - 1 - pads[1])
    phases: Any = epilogue.conv.attrs["stride"]
    return ConvShape(n, o, p, q, c, r, s, height, width, (1, 1), padding, phases)


FAMILY = HopperDgrad()
