"""The first convolution of a network on a CPU: images of few channels, in nchw as callers bring
them, after a SpaceToDepth or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from plantune.graph import Step
from plantune.kernels.cpu import direct
from plantune.kernels.family import Attrs, Binding, Frame, images, refuse
from plantune.kernels.patterns.epilogue import ConvParts, conv_epilogue
from plantune.kernels.patterns.pointwise_conv import pointwise_conv_after

MOVED = "space_to_depth"
MOST_TAPS = 512  # as its kernel asserts


class PatchConv(direct.DirectConvFamily):
    """Config: `layout` of what leaves, which is nhwc. The value before an offset may leave, too.

    Each output of a 1x1 convolution after SpaceToDepth reads the patch that this would move into
    channels, so the kernel is that patch and the weight is only seen in another order.
    """

    name: ClassVar = "patch_conv"

    def read(self, step: Step) -> ConvParts:
        if step.nodes[0].op == MOVED:
            epilogue = pointwise_conv_after(step, MOVED, unshifted=True)
        else:
            epilogue = conv_epilogue(step, unshifted=True)
        epilogue.only_function()
        parts = direct.require_fitting(ConvParts(step, epilogue))
        channels, taps = step.types[parts.x].shape[1], math.prod(_kernel(parts))
        refuse(
            {
                f"it copies patches of at most {direct.FEW_CHANNELS} channels, got {channels}": (
                    channels > direct.FEW_CHANNELS
                ),
                f"it copies patches of at most {MOST_TAPS} pixels, got {taps}": taps > MOST_TAPS,
                "the residual is the image, which it reads in another layout": (
                    epilogue.residual == parts.x
                ),
            }
        )
        return parts

    def layouts(self, parts: ConvParts, config: Attrs) -> Mapping[str, str]:
        return {**images(parts.step, config["layout"]), parts.x: "nchw"}

    def entry(self, parts: ConvParts) -> str:
        return self.name

    def can_be_guessed(self, parts: ConvParts, config: Attrs) -> bool:
        return _block(parts) > 0

    def bind(self, parts: ConvParts, config: Attrs, frame: Frame) -> Binding:
        block, kernel = _block(parts), _kernel(parts)
        of_blocks = {"stride": kernel, "padding": (0, 0)}
        conv = direct.sizes(parts, kernel, of_blocks if block else parts.conv.attrs)

        def filters(weight: Tensor) -> Tensor:
            patch = as_patch(weight, block) if block else weight
            return patch.reshape(parts.outputs, -1, 1, 1)

        return self.bound(parts, frame, conv, filters)


def _block(parts: ConvParts) -> int:
    """The sides of what a SpaceToDepth before the convolution moves; 0 if there is none."""
    first = parts.step.nodes[0]
    return int(first.attrs["block"]) if first.op == MOVED else 0


def _kernel(parts: ConvParts) -> tuple[int, ...]:
    """The sides of a patch."""
    block = _block(parts)
    return (block, block) if block else parts.step.types[parts.weight].shape[2:]


def as_patch(weight: Tensor, block: int) -> Tensor:
    """(O, block * block * C, 1, 1), channel = (dy * block + dx) * C + c, as (O, C, dy, dx)."""
    return weight.view(weight.shape[0], block, block, -1).permute(0, 3, 1, 2)


FAMILY = PatchConv()
