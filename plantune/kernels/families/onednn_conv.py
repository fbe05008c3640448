"""oneDNN convolution with scale, bias and residual in its epilogue, on prepacked weights.

The convolution adds to its destination, so it can write into given memory: the destination holds
zeros or the residual before it. ReLU is applied in place behind it, because oneDNN's own turns NaN
into 0 (seen with 3.12) and would hide a diverging network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from plantune.errors import IllegalCandidate
from plantune.graph.ops.pointwise import along_axis
from plantune.graph.step import Step
from plantune.kernels.epilogue import ConvEpilogue, conv_epilogue
from plantune.kernels.family import Binding, Frame, KernelFamily, Values, images
from plantune.memory import in_layout
from plantune.space.arch import Arch
from plantune.values import Attrs

DTYPES = ("float32", "bfloat16")


class OneDnnConv(KernelFamily):
    """Config: `layout` of images; `prepack`, whether weights are kept in oneDNN's own layout."""

    name: ClassVar = "onednn_conv"
    arch_kinds = frozenset(("cpu",))

    def why_not_arch(self, arch: Arch) -> str | None:
        if not torch.backends.mkldnn.is_available():
            return "this torch was built without oneDNN"
        return super().why_not_arch(arch)

    def why_not_step(self, step: Step) -> str | None:
        try:
            conv = conv_epilogue(step).conv
        except IllegalCandidate as reason:
            return str(reason)
        if step.types[conv.name].dtype not in DTYPES:
            return f"oneDNN runs {' and '.join(DTYPES)}, not {step.types[conv.name].dtype}"
        return None

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return images(step, config["layout"])

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        return _bound(step, conv_epilogue(step), config, frame.values)


def _bound(step: Step, epilogue: ConvEpilogue, config: Attrs, values: Values) -> Binding:
    x, y = epilogue.conv.inputs[0], values[step.nodes[-1].name]
    residual = epilogue.residual
    geometry = _geometry(epilogue)
    run = torch.ops.mkldnn._convolution_pointwise_.binary
    packed: list[Any] = [None, None, None]

    def refresh() -> None:
        packed[:] = _packed(step, epilogue, config, values)

    def launch(stream: int) -> None:
        weight, bias, least = packed
        if residual is None:
            y.zero_()
        else:
            y.copy_(values[residual])
        run(y, values[x], weight, bias, *geometry, "add", 1.0, None, [], None)
        if least is not None:
            y.clamp_(min=least)

    return Binding(launch, refresh)


def _geometry(epilogue: ConvEpilogue) -> tuple[Any, ...]:
    attrs = epilogue.conv.attrs
    pairs = [list(attrs[key]) for key in ("padding", "stride", "dilation")]
    return (*pairs, attrs["groups"])


def _packed(
    step: Step, epilogue: ConvEpilogue, config: Attrs, values: Values
) -> tuple[Tensor, Tensor | None, float | None]:
    """The scaled weight, the bias per channel, and the least value where there is a ReLU.

    relu(v) + offset is max(v + offset, offset), so the offset goes into the bias too.
    """
    x, w = epilogue.conv.inputs
    weight, bias = values[w], None
    if epilogue.scale is not None:
        weight = weight * along_axis(values[epilogue.scale], 4, 0)
    for part in (epilogue.bias, epilogue.offset):
        if part is not None:
            channel = values[part].expand(weight.shape[0]).contiguous()
            bias = channel if bias is None else bias + channel
    least = None
    if epilogue.relu:
        least = 0.0 if epilogue.offset is None else values[epilogue.offset].item()
    weight = in_layout(weight, config["layout"])
    if config["prepack"]:
        padding, stride, dilation, groups = _geometry(epilogue)
        shape = list(step.types[x].shape)
        pack = torch.ops.mkldnn._reorder_convolution_weight
        weight = pack(weight, padding, stride, dilation, groups, shape)
    return weight, bias, least


FAMILY = OneDnnConv()
