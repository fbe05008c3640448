"""oneDNN convolution with scale, bias, residual and a function, on prepacked weights."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from plantune.graph.layouts import in_layout
from plantune.kernels.cpu import onednn
from plantune.kernels.family import Attrs, Binding, Frame, Step
from plantune.kernels.patterns.epilogue import ConvParts, usual_parts


class OneDnnConv(onednn.OneDnnFamily[ConvParts]):
    """Config: `layout` of images; `prepack`, whether weights are kept in oneDNN's own layout."""

    name: ClassVar = "onednn_conv"

    def read(self, step: Step) -> ConvParts:
        return usual_parts(step)

    def bind(self, parts: ConvParts, config: Attrs, frame: Frame) -> Binding:
        geometry = onednn.Geometry.of(parts.conv.attrs)
        shape = parts.step.types[parts.x].shape

        def pack(weight: Tensor) -> Tensor:
            weight = in_layout(weight, config["layout"])
            return onednn.pack(weight, geometry, shape) if config["prepack"] else weight

        return onednn.bound(parts, frame, geometry, pack)


FAMILY = OneDnnConv()
