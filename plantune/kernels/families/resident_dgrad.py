"""Gradients of images whose weights stay in shared memory: `csrc/cuda/resident_conv.h`."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from plantune.kernels.family import Arch, Attrs, Frame, Step, refuse
from plantune.kernels.hopper.family import WarpgroupParts
from plantune.kernels.hopper.gradient import GradientParts
from plantune.kernels.hopper.resident import TILE_O
from plantune.kernels.hopper.resident_design import ResidentDesign
from plantune.kernels.hopper.resident_family import ResidentFamily
from plantune.kernels.hopper.tiles import CHUNK
from plantune.kernels.legality import not_within
from plantune.kernels.patterns.epilogue import ConvParts
from plantune.kernels.patterns.image_gradient import image_gradient
from plantune.kernels.weights.constants import Arrangement, Constants, channel_values

STRIDES = ((1, 1), (2, 2))


class ResidentDgrad(ResidentFamily):
    """Config: see `ResidentFamily`. Each pass puts the channels of the result next to each other in
    the weights. Where the convolution has a stride, a tile makes the pixels of all its phases.
    """

    name: ClassVar = "resident_dgrad"
    reads_channels_last: ClassVar = False
    flips: ClassVar = True

    def read(self, step: Step) -> GradientParts:
        parts = GradientParts(step, image_gradient(step))
        attrs, pool = parts.conv.attrs, parts.epilogue.pool
        strides, kernel = attrs["stride"], step.types[parts.weight].shape[2:]
        dy = step.types[parts.conv.inputs[0]]
        other = pool is not None and step.types[pool.inputs[0]].shape[2:] != dy.shape[2:]
        refuse(
            {
                f"only gradients of convolutions with stride 1 or 2, got {strides}": strides
                not in STRIDES,
                f"a phase of a {kernel} kernel has more than 2x2 taps, or none": strides != (1, 1)
                and not all(size in (2, 3) for size in kernel),
                "the gradient of the pool has another size than that of the result": other,
                **not_within(attrs["padding"], kernel),
            }
        )
        self.require(parts)
        return parts

    def why_not_config(self, parts: WarpgroupParts, config: Attrs, arch: Arch) -> str | None:
        shape, stages = parts.shape, int(config["stages"])
        if shape.phases != (1, 1) and stages < shape.chunks:
            return f"phases read all {shape.chunks * CHUNK} channels, {stages} stages hold less"
        return super().why_not_config(parts, config, arch)

    def constants(self, parts: ConvParts, design: ResidentDesign, frame: Frame) -> Constants:
        type_ = parts.step.types[parts.weight]
        o, c, r, s = type_.shape
        rows = 0 if c % 16 == 0 else design.tiles_o * TILE_O
        arrangement = Arrangement((c, r, s, o), type_.torch_dtype, by_image_channels, rows=rows)
        offset = parts.epilogue.offset
        one = channel_values(parts.step.types[offset or parts.weight], 1)
        return Constants(frame, {"w": (parts.weight, arrangement), "offset": (offset, one)})


def by_image_channels(weight: Tensor) -> Tensor:
    """A convolution's weight as (C, R, S, O)."""
    return weight.permute(1, 2, 3, 0)


FAMILY = ResidentDgrad()
