"""Matrix products with bias and activation: linear layers, and 1x1 convolutions over pixels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from plantune.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.graph.graph import Node
from plantune.graph.ops.matmul import operands
from plantune.graph.step import Step
from plantune.kernels.family import Binding, Frame, KernelFamily, Values, images
from plantune.kernels.patterns.epilogue import ConvEpilogue, conv_epilogue, folded_constants
from plantune.space.arch import Arch

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "sigmoid": torch.sigmoid_,
}


class Gemm(KernelFamily):
    """Config: `layout` of images; it says whether a 1x1 convolution multiplies rows or columns."""

    name: ClassVar = "gemm"
    arch_kinds = frozenset(("cpu",))

    def why_not_step(self, step: Step) -> str | None:
        if step.ops[0] == "conv2d":
            return _why_not_conv(step)
        if step.ops not in _linear_forms():
            return "only a 1x1 convolution, or a matrix product with bias and activation"
        if [name for name, _ in step.outputs] != [step.nodes[-1].name]:
            return "a value before the end of the step is read outside of it"
        return _why_not_bias(step.nodes)

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        if step.ops[0] == "matmul" and config["layout"] != "nchw":
            return "a matrix product has no image, so its layout is nchw"
        return None

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return images(step, config["layout"])

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        if step.ops[0] == "matmul":
            return _bound_linear(step, frame.values)
        bind = _bound_rows if config["layout"] == "nhwc" else _bound_columns
        return bind(step, conv_epilogue(step), frame.values)


def _linear_forms() -> set[tuple[str, ...]]:
    biased = ("matmul", "add_channel")
    return {("matmul",), biased, *((*biased, activation) for activation in ACTIVATIONS)}


def _why_not_bias(nodes: tuple[Node, ...]) -> str | None:
    for before, node in itertools.pairwise(nodes):
        if node.inputs[0] != before.name:
            return f"{node.name!r} does not read {before.name!r}, the value before it"
    if len(nodes) > 1 and nodes[1].attrs["axis"] != 1:
        return "the bias is not one per column"
    return None


def _why_not_conv(step: Step) -> str | None:
    try:
        epilogue = conv_epilogue(step)
    except IllegalCandidate as reason:
        return str(reason)
    attrs = epilogue.conv.attrs
    kernel = step.types[epilogue.conv.inputs[1]].shape[2:]
    plain = (attrs["stride"], attrs["padding"], attrs["groups"]) == ((1, 1), (0, 0), 1)
    if kernel != (1, 1) or not plain:
        return "only a 1x1 convolution of stride 1 without padding and groups is a matrix product"
    return None


def _bound_linear(step: Step, values: Values) -> Binding:
    product, *rest = step.nodes
    (a, b), y = product.inputs, values[step.nodes[-1].name]
    bias = rest[0].inputs[1] if rest else None
    activate = ACTIVATIONS[rest[1].op] if len(rest) > 1 else None

    def launch(stream: int) -> None:
        left, right = operands((values[a], values[b]), product.attrs)
        if bias is None:
            torch.mm(left, right, out=y)
        else:
            torch.addmm(values[bias], left, right, out=y)
        if activate is not None:
            activate(y)

    return Binding(launch)


def _bound_rows(step: Step, epilogue: ConvEpilogue, values: Values) -> Binding:
    """Images in nhwc: pixels are rows, (N*H*W, C) @ (C, O)."""
    x, residual, y = epilogue.conv.inputs[0], epilogue.residual, values[step.nodes[-1].name]
    rows = _rows(y)
    folded: list[tuple[Tensor, Tensor | None, float | None]] = []

    def refresh() -> None:
        weight, bias, least = folded_constants(epilogue, values)
        folded[:] = [(weight.flatten(1).t(), bias, least)]

    def launch(stream: int) -> None:
        weight, bias, least = folded[0]
        pixels = _rows(values[x])
        if residual is not None:
            torch.addmm(_rows(values[residual]), pixels, weight, out=rows)
        elif bias is not None:
            torch.addmm(bias, pixels, weight, out=rows)
        else:
            torch.mm(pixels, weight, out=rows)
        if residual is not None and bias is not None:
            rows.add_(bias)
        if least is not None:
            rows.clamp_(min=least)

    return Binding(launch, refresh)


def _rows(image: Tensor) -> Tensor:
    """An image in nhwc as the matrix (N*H*W, C), a view."""
    return image.permute(0, 2, 3, 1).view(-1, image.shape[1])


def _bound_columns(step: Step, epilogue: ConvEpilogue, values: Values) -> Binding:
    """Images in nchw: pixels are columns, one product (O, C) @ (C, H*W) an image."""
    x, residual, y = epilogue.conv.inputs[0], epilogue.residual, values[step.nodes[-1].name]
    columns = y.flatten(2)
    folded: list[tuple[Tensor, Tensor | None, float | None]] = []

    def refresh() -> None:
        weight, bias, least = folded_constants(epilogue, values)
        batched = weight.flatten(1).expand(y.shape[0], -1, -1)
        folded[:] = [(batched, None if bias is None else bias.view(1, -1, 1), least)]

    def launch(stream: int) -> None:
        weight, bias, least = folded[0]
        pixels = values[x].flatten(2)
        if residual is not None:
            torch.baddbmm(values[residual].flatten(2), weight, pixels, out=columns)
        elif bias is not None:
            torch.baddbmm(bias, weight, pixels, out=columns)
        else:
            torch.bmm(weight, pixels, out=columns)
        if residual is not None and bias is not None:
            columns.add_(bias)
        if least is not None:
            columns.clamp_(min=least)

    return Binding(launch, refresh)


FAMILY = Gemm()
