"""Matrix products with bias and activation: linear layers, and 1x1 convolutions over pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from plantune.graph.ops.functions import FUNCTIONS
from plantune.graph.ops.matmul import operands
from plantune.kernels.cpu.folded import Folded
from plantune.kernels.family import Arch, Attrs, Binding, Frame, KernelFamily, Step, Values, refuse
from plantune.kernels.patterns.epilogue import ConvParts, usual_parts
from plantune.kernels.patterns.linear_layer import LinearLayer, linear_layer_of
from plantune.kernels.patterns.pointwise_conv import POINTWISE, is_pointwise

Product = Callable[..., Tensor]


class Gemm(KernelFamily[LinearLayer | ConvParts]):
    """Config: `layout` of images; it says whether a 1x1 convolution multiplies rows or columns."""

    name: ClassVar = "gemm"
    arch_kinds = frozenset(("cpu",))

    def read(self, step: Step) -> LinearLayer | ConvParts:
        known = step.ops[0] in ("conv2d", "matmul")
        refuse({"only a 1x1 convolution, or a matrix product with bias and activation": not known})
        if step.ops[0] == "matmul":
            return linear_layer_of(step)
        parts = usual_parts(step)
        refuse({f"only {POINTWISE} is a matrix product": not is_pointwise(step, parts.conv)})
        return parts

    def why_not_config(
        self, parts: LinearLayer | ConvParts, config: Attrs, arch: Arch
    ) -> str | None:
        if isinstance(parts, LinearLayer) and config["layout"] != "nchw":
            return "a matrix product has no image, so its layout is nchw"
        return None

    def bind(self, parts: LinearLayer | ConvParts, config: Attrs, frame: Frame) -> Binding:
        if isinstance(parts, LinearLayer):
            return _bound_linear(parts, frame.values)
        bind = _bound_rows if config["layout"] == "nhwc" else _bound_columns
        return bind(parts, frame.values)


def _bound_linear(layer: LinearLayer, values: Values) -> Binding:
    a, b, bias, y = layer.a, layer.b, layer.bias, values[layer.y]
    function = None if layer.activation is None else FUNCTIONS[layer.activation].torch

    def launch(stream: int) -> None:
        left, right = operands((values[a], values[b]), layer.product.attrs)
        if bias is None:
            torch.mm(left, right, out=y)
        else:
            torch.addmm(values[bias], left, right, out=y)
        if function is not None:
            function(y, out=y)

    return Binding(launch)


def _bound_rows(parts: ConvParts, values: Values) -> Binding:
    """Images in nhwc: pixels are rows, (N*H*W, C) @ (C, O)."""
    folded = Folded(parts.epilogue, values, lambda weight: weight.flatten(1).t())

    def factors(x: Tensor) -> tuple[Tensor, Tensor]:
        return _rows(x), folded.weight

    return _bound(parts, values, folded, _rows, factors, (torch.mm, torch.addmm))


def _rows(image: Tensor) -> Tensor:
    """An image in nhwc as the matrix (N*H*W, C), a view."""
    return image.permute(0, 2, 3, 1).view(-1, image.shape[1])


def _bound_columns(parts: ConvParts, values: Values) -> Binding:
    """Images in nchw: pixels are columns, one product (O, C) @ (C, H*W) an image."""
    images = values[parts.y].shape[0]

    def pack(weight: Tensor) -> Tensor:
        return weight.flatten(1).expand(images, -1, -1)

    folded = Folded(parts.epilogue, values, pack, bias_shape=(1, -1, 1))

    def factors(x: Tensor) -> tuple[Tensor, Tensor]:
        return folded.weight, x.flatten(2)

    def columns(image: Tensor) -> Tensor:
        return image.flatten(2)

    return _bound(parts, values, folded, columns, factors, (torch.bmm, torch.baddbmm))


def _bound(
    parts: ConvParts,
    values: Values,
    folded: Folded,
    matrix: Callable[[Tensor], Tensor],
    factors: Callable[[Tensor], tuple[Tensor, Tensor]],
    products: tuple[Product, Product],
) -> Binding:
    """`products` are one without and one with something added, which it takes first."""
    multiply, add = products
    x, residual, y = parts.x, parts.epilogue.residual, matrix(values[parts.y])

    def launch(stream: int) -> None:
        bias = folded.bias
        added = bias if residual is None else matrix(values[residual])
        if added is None:
            multiply(*factors(values[x]), out=y)
        else:
            add(added, *factors(values[x]), out=y)
        if residual is not None and bias is not None:
            y.add_(bias)
        folded.finish(y)

    return Binding(launch, folded.refresh)


FAMILY = Gemm()
