"""Gradients of images whose weights stay in shared memory: `csrc/cuda/resident_conv.h`."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from plantune.graph.step import Step
from plantune.kernels.constants import Constants, Form
from plantune.kernels.families.hopper_dgrad import GradientParts
from plantune.kernels.families.resident_conv import TILE_O, Design, ResidentConv
from plantune.kernels.family import Frame
from plantune.kernels.legality import refuse
from plantune.kernels.patterns.epilogue import ConvParts
from plantune.kernels.patterns.image_gradient import image_gradient


class ResidentDgrad(ResidentConv):
    """Config: that of `resident_conv`. Each pass puts the channels of the result next to each other
    in the weights.
    """

    name: ClassVar = "resident_dgrad"
    reads_channels_last: ClassVar = False
    flips: ClassVar = True

    def read(self, step: Step) -> GradientParts:
        parts = GradientParts(step, image_gradient(step))
        attrs = parts.conv.attrs
        kernel = step.types[parts.weight].shape[2:]
        wide = any(pad >= size for pad, size in zip(attrs["padding"], kernel, strict=True))
        refuse(
            {
                f"only gradients of convolutions with stride 1, got {attrs['stride']}": attrs[
                    "stride"
                ]
                != (1, 1),
                "the gradient of a pool is added": parts.epilogue.pool is not None,
                f"the padding {attrs['padding']} is not smaller than the kernel {kernel}": wide,
            }
        )
        self.require(parts)
        return parts

    def constants(self, parts: ConvParts, design: Design, frame: Frame) -> Constants:
        type_ = parts.step.types[parts.weight]
        o, c, r, s = type_.shape
        rows = 0 if c % 16 == 0 else design.tiles_o * TILE_O
        form = Form((c, r, s, o), type_.torch_dtype, by_image_channels, rows=rows)
        return Constants(frame, {"w": (parts.weight, form)})


def by_image_channels(weight: Tensor) -> Tensor:
    """A convolution's weight as (C, R, S, O)."""
    return weight.permute(1, 2, 3, 0)


FAMILY = ResidentDgrad()
