"""Convolution of images, and its two gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plantune.canonical import Attrs
from plantune.graph.ops.base import Gradient, Op, Types
from plantune.graph.types import TensorType


class ConvOp(Op):
    """What the three share. x is (N, C, H, W), w is (O, C / groups, kh, kw), y is (N, O, P, Q)."""

    arity = 2

    def output_type(self, x: TensorType, w: TensorType, attrs: Attrs) -> TensorType:
        self.require(len(x.shape) == len(w.shape) == 4, f"needs rank 4, got {x.shape}, {w.shape}")
        self.require(x.dtype == w.dtype, f"dtypes differ: {x.dtype} and {w.dtype}")
        n, c, *image = x.shape
        o, c_of_group, *kernel = w.shape
        groups = attrs["groups"]
        self.require(
            groups > 0 and c == c_of_group * groups and o % groups == 0,
            f"{c} channels do not fit weight {w.shape} in {groups} groups",
        )
        self.require(
            min(attrs["stride"]) > 0 and min(attrs["dilation"]) > 0 and min(attrs["padding"]) >= 0,
            f"stride and dilation start at 1, padding at 0, got {attrs}",
        )
        self.require(min(kernel) > 0, f"kernel {tuple(kernel)} is empty")
        sizes = [
            (size + 2 * pad - dilation * (k - 1) - 1) // stride + 1
            for size, k, stride, pad, dilation in zip(
                image, kernel, attrs["stride"], attrs["padding"], attrs["dilation"], strict=True
            )
        ]
        self.require(min(sizes) > 0, f"image {tuple(image)} is smaller than kernel {tuple(kernel)}")
        return TensorType((n, o, *sizes), x.dtype)

    def macs(self, y: TensorType, w: TensorType) -> int:
        return y.numel * math.prod(w.shape[1:])


def geometry(attrs: Attrs) -> dict[str, Any]:
    """The attributes that the convolution shares with its gradients."""
    return {key: attrs[key] for key in ("stride", "padding", "dilation", "groups")}


class Conv2d(ConvOp):
    name = "conv2d"

    def infer(self, inputs: Sequence[TensorType], attrs: Attrs) -> Types:
        x, w = inputs
        return (self.output_type(x, w, attrs),)

    def evaluate(self, inputs: Sequence[Tensor], attrs: Attrs) -> tuple[Tensor, ...]:
        x, w = inputs
        return (torch.conv2d(x, w, **geometry(attrs)),)

    def gradient(self, grad: Gradient) -> tuple[str | None, ...]:
        (dy,) = grad.output_gradients
        assert dy is not None
        x, w = grad.inputs
        same = geometry(grad.attrs)
        dx = dw = None
        if grad.needs(0):
            dx = grad.emit("conv2d_dgrad", dy, w, shape=grad.type_of(x).shape, **same)
        if grad.needs(1):
            dw = grad.emit("conv2d_wgrad", dy, x, shape=grad.type_of(w).shape, **same)
        return (dx, dw)

    def flops(
        self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], attrs: Attrs
    ) -> int:
        return 2 * self.macs(outputs[0], inputs[1])


def convolution_backward(
    dy: Tensor, x: Tensor, w: Tensor, attrs: Attrs, mask: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """torch's own gradients of a convolution without bias: of x, of w, as `mask` asks."""
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy,
        x,
        w,
        None,
        attrs["stride"],
        attrs["padding"],
        attrs["dilation"],
        False,
        (0, 0),
        attrs["groups"],
        (*mask, False),
    )
    return dx, dw


def unread_like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of which torch reads shape and layout only: those of images like `tensor`.

    It is dense, because torch copies an expanded one before it looks at it.
    """
    plain = tensor.is_contiguous()
    layout = torch.contiguous_format if plain else torch.channels_last
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=layout)


class Conv2dDgrad(ConvOp):
    """The gradient with respect to the image, whose shape is an attribute."""

    name = "conv2d_dgrad"

    def infer(self, inputs: Sequence[TensorType], attrs: Attrs) -> Types:
        dy, w = inputs
        x = TensorType(attrs["shape"], dy.dtype)
        y = self.output_type(x, w, attrs)
        self.require(y.shape == dy.shape, f"dy has shape {dy.shape}, needs {y.shape}")
        return (x,)

    def evaluate(self, inputs: Sequence[Tensor], attrs: Attrs) -> tuple[Tensor, ...]:
        dy, w = inputs
        x = unread_like(dy, attrs["shape"])
        return (convolution_backward(dy, x, w, attrs, (True, False))[0],)

    def flops(
        self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], attrs: Attrs
    ) -> int:
        return 2 * self.macs(inputs[0], inputs[1])


class Conv2dWgrad(ConvOp):
    """The gradient with respect to the weight, whose shape is an attribute."""

    name = "conv2d_wgrad"

    def infer(self, inputs: Sequence[TensorType], attrs: Attrs) -> Types:
        dy, x = inputs
        w = TensorType(attrs["shape"], dy.dtype)
        y = self.output_type(x, w, attrs)
        self.require(y.shape == dy.shape, f"dy has shape {dy.shape}, needs {y.shape}")
        return (w,)

    def evaluate(self, inputs: Sequence[Tensor], attrs: Attrs) -> tuple[Tensor, ...]:
        dy, x = inputs
        w = unread_like(x, attrs["shape"])
        return (convolution_backward(dy, x, w, attrs, (False, True))[1],)

    def flops(
        self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], attrs: Attrs
    ) -> int:
        return 2 * self.macs(inputs[0], outputs[0])


OPS: tuple[Op, ...] = (Conv2d(), Conv2dDgrad(), Conv2dWgrad())
