"""Convolutions on Hopper's tensor copies and warpgroup products: `csrc/cuda/hopper_conv.h`."""

from __future__ import annotations

from typing import Any, ClassVar

from plantune.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels.family import Binding, Frame
from plantune.kernels.hopper.design import Design
from plantune.kernels.hopper.family import HopperFamily, estimate_us, why_not_conv, why_not_reuse
from plantune.kernels.hopper.launch import Launch
from plantune.kernels.hopper.prepared import Prepared
from plantune.kernels.hopper.tiles import (
    conv_shape,
    dense_box,
    reused_box,
)
from plantune.kernels.patterns.epilogue import ConvEpilogue, conv_epilogue
from plantune.space.arch import Arch

INCLUDE = '#include "cuda/hopper_conv.h"\n'


class HopperConv(HopperFamily):
    """Config: `tile_m` pixels by `tile_n` channels, `stages` of weights (and of images) in flight,
    `split_k` blocks of a cluster share a tile, `reuse` loads a pixel once for all taps, at most
    `blocks_per_sm` share an SM. Where a kernel follows at once, the blocks of a small grid are
    placed unevenly if more than one fits: 64 -> 128 channels, stride 2, 128 images took 5.0 us with
    one, 5.6 with two, 6.4 with three (H200, 2026-11-20).
    """

    name: ClassVar = "hopper_conv"

    def why_not_step(self, step: Step) -> str | None:
        try:
            return why_not_conv(step, conv_epilogue(step, unshifted=True))
        except IllegalCandidate as reason:
            return str(reason)

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        shape = conv_shape(step, conv_epilogue(step, unshifted=True))
        if config["reuse"] and (reason := why_not_reuse(shape, int(config["tile_m"]))):
            return reason
        return super().why_not_config(step, config, arch)

    def design(self, step: Step, config: Attrs) -> Design:
        return _design(step, config)

    def whole(self, step: Step) -> ConvEpilogue:
        return conv_epilogue(step, unshifted=True)

    def source(self, step: Step, config: Attrs, arch: Arch) -> str:
        epilogue, design = conv_epilogue(step, unshifted=True), _design(step, config)
        constants = design.constants(step.types[epilogue.conv.name].dtype, epilogue)
        return INCLUDE + constants + design.kernel("HopperConv", "ConvScalars")

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        epilogue, design = conv_epilogue(step, unshifted=True), _design(step, config)
        prepared = Prepared(step, epilogue, frame)
        launch = Launch(step, epilogue, design, frame, prepared.weight, prepared.scalars)
        return Binding(launch.bound(), constants=prepared.constants)

    def estimate_us(self, step: Step, config: Attrs) -> float:
        return estimate_us(_design(step, config), self.traffic_bytes(step))


def _design(step: Step, config: Attrs) -> Design:
    epilogue = conv_epilogue(step, unshifted=True)
    shape, tile_m = conv_shape(step, epilogue), int(config["tile_m"])
    box = reused_box(shape, tile_m) if config["reuse"] else dense_box(shape, tile_m)
    if box is None:
        raise IllegalCandidate(f"no box of {tile_m} pixels by 8x8 can be copied at once")
    axes: dict[str, Any] = dict(config)
    return Design(shape, box, **axes, outputs=1 if epilogue.unshifted is None else 2)


FAMILY = HopperConv()
