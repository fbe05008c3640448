"""Convolutions by `csrc/cpu/direct_conv.cpp`, which reads each weight once for up to 64 pixels."""

from __future__ import annotations

from typing import ClassVar

from plantune.graph import Step
from plantune.kernels.cpu import direct
from plantune.kernels.family import Attrs, Binding, Frame
from plantune.kernels.patterns.epilogue import ConvParts, usual_parts


class DirectConv(direct.DirectConvFamily):
    """Config: `layout`, which is nhwc: all channels of a pixel are read one after the other."""

    name: ClassVar = "direct_conv"

    def read(self, step: Step) -> ConvParts:
        return direct.require_fitting(usual_parts(step))

    def can_be_guessed(self, parts: ConvParts, config: Attrs) -> bool:
        return direct.is_large(parts.step.types[parts.x].shape[1], parts.outputs)

    def bind(self, parts: ConvParts, config: Attrs, frame: Frame) -> Binding:
        kernel = parts.step.types[parts.weight].shape[2:]
        return self.bound(parts, frame, direct.sizes(parts, kernel, parts.conv.attrs))


FAMILY = DirectConv()
