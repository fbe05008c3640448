"""A convolution followed by squeeze-and-excite, in one kernel: `hopper_conv_se.h`."""

from __future__ import annotations

from typing import ClassVar

from plantune.kernels.family import Arch, Attrs, Binding, Frame, Step, refuse
from plantune.kernels.hopper import family as hopper
from plantune.kernels.hopper import squeeze
from plantune.kernels.hopper.launch import Launch
from plantune.kernels.weights.constants import Constants

INCLUDE = '#include "cuda/se_resnet9/hopper_conv_se.h"\n'


class HopperConvSe(squeeze.SeFamily[squeeze.SeParts]):
    """Config: `tile_m` pixels of whole images and `stages` of weights in flight; at most
    `blocks_per_sm` share an SM.
    """

    name: ClassVar = "hopper_conv_se"

    def read(self, step: Step) -> squeeze.SeParts:
        epilogue, layers = squeeze.parts_of(step)
        parts, width = squeeze.SeParts(step, epilogue, layers), layers.squeeze.width
        o, p, q = parts.shape.o, parts.shape.p, parts.shape.q
        refuse(
            {
                f"it takes up to {squeeze.HIDDEN_MAX} hidden channels, got {width}": width
                > squeeze.HIDDEN_MAX,
                f"a block has all channels of its pixels: 64 or 128, got {o}": o
                not in squeeze.TILE_NS,
                f"a warpgroup has 8x8 pixels of one image, got {p}x{q}": p % 8 or q % 8,
                **hopper.not_a_warpgroups(step, epilogue),
            }
        )
        return parts

    def why_not_config(self, parts: squeeze.SeParts, config: Attrs, arch: Arch) -> str | None:
        reason = hopper.why_not_reuse(parts.shape, int(config["tile_m"]))
        return reason or super().why_not_config(parts, config, arch)

    def source(self, parts: squeeze.SeParts, config: Attrs, arch: Arch) -> str:
        design = self.design(parts, config)
        more = squeeze.hidden_members(parts.layers)
        constants = design.constants(parts.dtype, parts.epilogue, **more)
        return INCLUDE + constants + design.kernel("HopperConvSe", "ConvSeScalars")

    def bind(self, parts: squeeze.SeParts, config: Attrs, frame: Frame) -> Binding:
        read = hopper.filter_and_scalars(parts.step, parts.epilogue) | squeeze.layer_constants(
            parts
        )
        constants = Constants(frame, read)
        return Launch(
            parts, self.design(parts, config), frame, constants, squeeze.SeScalars
        ).bound()

    def estimate_us(self, parts: squeeze.SeParts, config: Attrs, arch: Arch) -> float:
        conv_us = hopper.estimate_us(self.design(parts, config), parts.step.traffic_bytes, arch)
        return conv_us + arch.cost(hopper.COSTS)["layers_us"]


FAMILY = HopperConvSe()
