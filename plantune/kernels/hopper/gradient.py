"""The gradient of an image, as the convolution that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from plantune.graph.step import Step
from plantune.kernels.hopper.family import WarpgroupParts
from plantune.kernels.hopper.tiles import ConvShape
from plantune.kernels.patterns.epilogue import ConvEpilogue


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


def gradient_shape(step: Step, epilogue: ConvEpilogue) -> ConvShape:
    """The convolution of the result's gradient that makes the image's."""
    dy, w = (step.types[name].shape for name in epilogue.conv.inputs)
    (n, o, p, q), (_, c, r, s) = dy, w
    height, width = step.types[epilogue.conv.name].shape[2:]
    pads: Any = epilogue.conv.attrs["padding"]
    padding = (r - 1 - pads[0], s - 1 - pads[1])
    phases: Any = epilogue.conv.attrs["stride"]
    return ConvShape(n, o, p, q, c, r, s, height, width, (1, 1), padding, phases)
