"""Average pooling and a 1x1 convolution in one pass on a CPU."""

from __future__ import annotations

from typing import Any, ClassVar

from plantune.graph import Step
from plantune.kernels.cpu import direct
from plantune.kernels.family import Attrs, Binding, Frame, refuse
from plantune.kernels.patterns.epilogue import ConvParts
from plantune.kernels.patterns.pointwise_conv import pointwise_conv_after


class PooledConv(direct.DirectConvFamily):
    """Config: `layout`, which is nhwc: all channels of a pixel are read one after the other."""

    name: ClassVar = "pooled_conv"

    def read(self, step: Step) -> ConvParts:
        parts = ConvParts(step, pointwise_conv_after(step, "avg_pool2d"))
        parts.epilogue.only_function()
        pool: Any = step.nodes[0].attrs
        left_out = any(pool["padding"]) and not pool["count_padding"]
        refuse({"padding counts as zeros here, and the pool leaves it out": left_out})
        return direct.require_fitting(parts)

    def entry(self, parts: ConvParts) -> str:
        return self.name

    def can_be_guessed(self, parts: ConvParts, config: Attrs) -> bool:
        return direct.is_large(parts.step.types[parts.x].shape[1], parts.outputs)

    def bind(self, parts: ConvParts, config: Attrs, frame: Frame) -> Binding:
        pool: Any = parts.step.nodes[0].attrs
        return self.bound(parts, frame, direct.sizes(parts, pool["kernel"], pool))


FAMILY = PooledConv()
