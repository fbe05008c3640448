"""A convolution followed by squeeze-and-excite, in one kernel: `hopper_conv_se.h`."""

from __future__ import annotations

from typing import Any, ClassVar

from plantune.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels.family import Binding, Frame
from plantune.kernels.hopper.design import Design
from plantune.kernels.hopper.family import (
    HopperFamily,
    estimate_us,
    why_not_conv,
    why_not_reuse,
)
from plantune.kernels.hopper.launch import Launch
from plantune.kernels.hopper.squeeze import (
    HIDDEN_MAX,
    LAYERS_US,
    TILE_NS,
    PreparedSe,
    hidden_constants,
    layers_bytes,
    parts_of,
)
from plantune.kernels.hopper.tiles import Box, conv_shape
from plantune.kernels.patterns.epilogue import ConvEpilogue
from plantune.space.arch import Arch

INCLUDE = '#include "cuda/se_resnet9/hopper_conv_se.h"\n'


class HopperConvSe(HopperFamily):
    """Config: `tile_m` pixels of whole images and `stages` of weights in flight; at most
    `blocks_per_sm` share an SM.
    """

    name: ClassVar = "hopper_conv_se"

    def why_not_step(self, step: Step) -> str | None:
        try:
            epilogue, layers = parts_of(step)
        except IllegalCandidate as reason:
            return str(reason)
        shape = conv_shape(step, epilogue)
        if layers.squeeze.width > HIDDEN_MAX:
            return f"it takes up to {HIDDEN_MAX} hidden channels, got {layers.squeeze.width}"
        if shape.o not in TILE_NS:
            return f"a block has all channels of its pixels: 64 or 128, got {shape.o}"
        if shape.p % 8 or shape.q % 8:
            return f"a warpgroup has 8x8 pixels of one image, got {shape.p}x{shape.q}"
        return why_not_conv(step, epilogue)

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        shape, tile_m = conv_shape(step, parts_of(step)[0]), int(config["tile_m"])
        if reason := why_not_reuse(shape, tile_m):
            return reason
        if tile_m % (shape.p * shape.q):
            return f"{tile_m} pixels are not whole images of {shape.p}x{shape.q}"
        return super().why_not_config(step, config, arch)

    def design(self, step: Step, config: Attrs) -> Design:
        return _design(step, config)

    def whole(self, step: Step) -> ConvEpilogue:
        return parts_of(step)[0]

    def source(self, step: Step, config: Attrs, arch: Arch) -> str:
        (epilogue, layers), design = parts_of(step), _design(step, config)
        dtype = step.types[epilogue.conv.name].dtype
        constants = design.constants(dtype, epilogue, hidden_constants(layers))
        return INCLUDE + constants + design.kernel("HopperConvSe", "ConvSeScalars")

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        epilogue, layers = parts_of(step)
        prepared = PreparedSe(step, epilogue, layers, frame)
        design = _design(step, config)
        launch = Launch(step, epilogue, design, frame, prepared.weight, prepared.scalars)
        return Binding(launch.bound(), constants=prepared.constants)

    def estimate_us(self, step: Step, config: Attrs) -> float:
        return estimate_us(_design(step, config), self.traffic_bytes(step)) + LAYERS_US


def _design(step: Step, config: Attrs) -> Design:
    epilogue, layers = parts_of(step)
    shape, tile_m = conv_shape(step, epilogue), int(config["tile_m"])
    count = max(1, tile_m // (shape.p * shape.q))
    box = Box(shape.q, shape.p, count)
    axes: dict[str, Any] = dict(config)
    return Design(
        shape,
        box,
        **axes,
        tile_n=shape.o,
        split_k=1,
        reuse=True,
        outputs=1 if epilogue.unshifted is None else 2,
        extra=((16, layers_bytes(tile_m, count, shape.o, layers)),),
    )


FAMILY = HopperConvSe()
