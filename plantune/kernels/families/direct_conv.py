"""Convolutions by `csrc/cpu/direct_conv.cpp`, which reads each weight once for up to 64 pixels."""

from __future__ import annotations

from typing import Any, ClassVar

from plantune.graph import Step
from plantune.kernels import direct
from plantune.kernels.family import Attrs, Binding, Frame, refuse
from plantune.kernels.folded import Folded
from plantune.kernels.patterns.epilogue import ConvParts, usual_parts
from plantune.kernels.patterns.expression import defined_function


class DirectConv(direct.DirectFamily[ConvParts]):
    """Config: `layout`, which is nhwc: all channels of a pixel are read one after the other."""

    name: ClassVar = "direct_conv"

    def defined(self, parts: ConvParts) -> str:
        return defined_function(parts.epilogue.chain)

    def read(self, step: Step) -> ConvParts:
        parts = usual_parts(step)
        refuse(
            {
                f"it is written for float32, got {parts.dtype}": parts.dtype != "float32",
                "groups are other families'": parts.conv.attrs["groups"] != 1,
                "there are no images": 0 in step.types[parts.x].shape or not parts.pixels,
            }
        )
        return parts

    def can_be_guessed(self, parts: ConvParts, config: Attrs) -> bool:
        return direct.is_large(parts.step.types[parts.x].shape[1], parts.outputs)

    def bind(self, parts: ConvParts, config: Attrs, frame: Frame) -> Binding:
        values, built, conv = frame.values, frame.built, _conv(parts)
        x, residual, y = parts.x, parts.epilogue.residual, values[parts.y]
        folded = Folded(parts.epilogue, values, lambda w: direct.panels(w, built.width), apart=True)

        def launch(stream: int) -> None:
            added = None if residual is None else values[residual].data_ptr()
            weight, end = folded.weight.data_ptr(), folded.after_sums(added)
            built.run(conv, values[x].data_ptr(), weight, end, y.data_ptr())

        return Binding(launch, folded.refresh)


def _conv(parts: ConvParts) -> direct.Conv:
    attrs: Any = parts.conv.attrs
    count, channels, height, width = parts.step.types[parts.x].shape
    outputs, rows, columns = parts.conv.types[0].shape[1:]
    kernel = parts.step.types[parts.weight].shape[2:]
    geometry = (*attrs["stride"], *attrs["padding"], *attrs["dilation"])
    sizes = (count, height, width, channels, rows, columns, outputs, *kernel)
    return direct.Conv(*sizes, *geometry)


FAMILY = DirectConv()
