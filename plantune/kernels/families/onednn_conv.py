"""oneDNN convolution with scale, bias and residual in its epilogue, on prepacked weights.

ReLU is applied in place after the convolution, because oneDNN's own turns NaN into 0 (seen with
3.12) and would hide a diverging network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from plantune.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels import onednn
from plantune.kernels.family import Binding, Frame, KernelFamily, images
from plantune.kernels.patterns.epilogue import conv_epilogue, folded_constants
from plantune.layouts import in_layout
from plantune.space.arch import Arch


class OneDnnConv(KernelFamily):
    """Config: `layout` of images; `prepack`, whether weights are kept in oneDNN's own layout."""

    name: ClassVar = "onednn_conv"
    arch_kinds = frozenset(("cpu",))
    flops_per_us = 2.3e5

    def why_not_arch(self, arch: Arch) -> str | None:
        if not onednn.is_there():
            return "this torch was built without oneDNN"
        return super().why_not_arch(arch)

    def why_not_step(self, step: Step) -> str | None:
        try:
            conv = conv_epilogue(step).conv
        except IllegalCandidate as reason:
            return str(reason)
        return onednn.why_not_dtype(step.types[conv.name].dtype)

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return images(step, config["layout"])

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        epilogue, values = conv_epilogue(step), frame.values
        x, residual, y = epilogue.conv.inputs[0], epilogue.residual, values[step.nodes[-1].name]
        geometry = onednn.Geometry.of(epilogue.conv.attrs)
        shape = step.types[x].shape
        prepared: list[Any] = [None, None, None]

        def refresh() -> None:
            weight, bias, least = folded_constants(epilogue, values)
            weight = in_layout(weight, config["layout"])
            if config["prepack"]:
                weight = onednn.pack(weight, geometry, shape)
            prepared[:] = weight, bias, least

        def launch(stream: int) -> None:
            weight, bias, least = prepared
            if residual is None:
                y.zero_()
            else:
                y.copy_(values[residual])
            onednn.add_convolution(y, values[x], weight, bias, geometry)
            if least is not None:
                y.clamp_(min=least)

        return Binding(launch, refresh)


FAMILY = OneDnnConv()
