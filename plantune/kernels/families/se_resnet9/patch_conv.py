"""SpaceToDepth and a 1x1 convolution as one oneDNN convolution with strides over the pixels.

Each output reads the block x block patch that SpaceToDepth would move into channels, so the kernel
is that patch and the weight is only seen in another order. Nothing is moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from plantune.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.graph.graph import Node
from plantune.graph.step import Step
from plantune.kernels import onednn
from plantune.kernels.family import Binding, Frame, KernelFamily, images
from plantune.kernels.patterns.epilogue import ConvEpilogue, conv_epilogue, folded_constants
from plantune.layouts import in_layout
from plantune.space.arch import Arch


class PatchConv(KernelFamily):
    """Config: `layout` of images."""

    name: ClassVar = "patch_conv"
    arch_kinds = frozenset(("cpu",))
    flops_per_us = 2e5

    def why_not_arch(self, arch: Arch) -> str | None:
        if not onednn.is_there():
            return "this torch was built without oneDNN"
        return super().why_not_arch(arch)

    def why_not_step(self, step: Step) -> str | None:
        try:
            epilogue = _behind_patches(step)
        except IllegalCandidate as reason:
            return str(reason)
        if epilogue.residual is not None:
            return "the patches have no residual"
        return onednn.why_not_dtype(step.types[epilogue.conv.name].dtype)

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return images(step, config["layout"])

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        epilogue, values = _behind_patches(step), frame.values
        x, y = step.nodes[0].inputs[0], values[step.nodes[-1].name]
        block, shape = step.nodes[0].attrs["block"], step.types[x].shape
        geometry = onednn.Geometry(stride=(block, block))
        prepared: list[Any] = [None, None, None]

        def refresh() -> None:
            weight, bias, least = folded_constants(epilogue, values)
            weight = in_layout(_as_patch(weight, block), config["layout"])
            prepared[:] = onednn.pack(weight, geometry, shape), bias, least

        def launch(stream: int) -> None:
            weight, bias, least = prepared
            y.zero_()
            onednn.add_convolution(y, values[x], weight, bias, geometry)
            if least is not None:
                y.clamp_(min=least)

        return Binding(launch, refresh)


def _behind_patches(step: Step) -> ConvEpilogue:
    """The 1x1 convolution after a space_to_depth; raises IllegalCandidate with the reason."""
    move, *rest = step.nodes
    if move.op != "space_to_depth" or not rest or rest[0].inputs[0] != move.name:
        raise IllegalCandidate("the step does not start with space_to_depth and its convolution")
    if move.name not in step.internal:
        raise IllegalCandidate("the moved pixels are read outside of the step")
    epilogue = conv_epilogue(_without_first(step))
    if not _is_pointwise(step, epilogue.conv):
        raise IllegalCandidate("only a 1x1 convolution of stride 1 without padding and groups")
    return epilogue


def _without_first(step: Step) -> Step:
    inputs = tuple((name, step.types[name]) for name in dict.fromkeys(_reads(step.nodes[1:])))
    return Step(step.nodes[1:], inputs, step.outputs, step.constants, step.phase)


def _reads(nodes: tuple[Node, ...]) -> list[str]:
    made = {value for node in nodes for value in node.outputs}
    return [value for node in nodes for value in node.inputs if value not in made]


def _is_pointwise(step: Step, conv: Node) -> bool:
    attrs, kernel = conv.attrs, step.types[conv.inputs[1]].shape[2:]
    return kernel == (1, 1) and (attrs["stride"], attrs["padding"], attrs["groups"]) == (
        (1, 1),
        (0, 0),
        1,
    )


def _as_patch(weight: Tensor, block: int) -> Tensor:
    """(O, block * block * C, 1, 1), channel = (dy * block + dx) * C + c, as (O, C, dy, dx)."""
    return weight.view(weight.shape[0], block, block, -1).permute(0, 3, 1, 2)


FAMILY = PatchConv()
