"""The gradient of an image, as the convolution that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from plantune.graph.step import Step
from plantune.kernels.hopper.family import WarpgroupParts, not_copied
from plantune.kernels.hopper.pipelined import PipelinedConv
from plantune.kernels.hopper.tiles import ConvShape
from plantune.kernels.legality import not_within, refuse
from plantune.kernels.patterns.epilogue import ConvEpilogue
from plantune.kernels.patterns.image_gradient import image_gradient

STRIDE_MAX = 2


@dataclass(frozen=True)
class GradientParts(WarpgroupParts):
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


class PipelinedGradient(PipelinedConv):
    """The gradient of an image by the kernels of a convolution."""

    reverses: ClassVar = True

    def read(self, step: Step) -> GradientParts:
        epilogue = image_gradient(step)
        strides, padding = epilogue.conv.attrs["stride"], epilogue.conv.attrs["padding"]
        kernel = step.types[epilogue.conv.inputs[1]].shape[2:]
        image = step.types[epilogue.conv.name].shape[2:]
        small = any(size < stride for size, stride in zip(image, strides, strict=True))
        parts = GradientParts(step, epilogue)
        self.require_types(parts)
        refuse(
            {
                f"only gradients of strides up to {STRIDE_MAX}, got {strides}": max(strides)
                > STRIDE_MAX,
                f"the image {image} is smaller than the stride {strides}": small,
                **not_within(padding, kernel),
                **not_copied(step, epilogue, parts.shape),
            }
        )
        return parts


def gradient_shape(step: Step, epilogue: ConvEpilogue) -> ConvShape:
    """The convolution of the result's gradient that makes the image's."""
    dy, w = (step.types[name].shape for name in epilogue.conv.inputs)
    (n, o, p, q), (_, c, r, s) = dy, w
    height, width = step.types[epilogue.conv.name].shape[2:]
    pads: Any = epilogue.conv.attrs["padding"]
    padding = (r - 1 - pads[0], s - 1 - pads[1])
    phases: Any = epilogue.conv.attrs["stride"]
    return ConvShape(n, o, p, q, c, r, s, height, width, (1, 1), padding, phases)
