"""Convolution of images, and its two gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.graph.ops.base import Gradient, Gradients, Op, Tensors, Types
from plantune.graph.types import TensorType


class ConvOp(Op):
    """What the three share. x is (N, C, H, W), w is (O, C / groups, kh, kw), y is (N, O, P, Q)."""

    arity = 2
    multiplies = True

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

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        x, w = inputs
        return (self.output_type(x, w, attrs),)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        x, w = inputs
        return (torch.conv2d(x, w, **geometry(attrs)),)

    def gradient(self, grad: Gradient) -> Gradients:
        dy = grad.dy
        x, w = grad.inputs
        same = geometry(grad.attrs)
        dx = dw = None
        if grad.needs(0):
            dx = grad.emit("conv2d_dgrad", dy, w, shape=grad.type_of(x).shape, **same)
        if grad.needs(1):
            dw = grad.emit("conv2d_wgrad", dy, x, shape=grad.type_of(w).shape, **same)
        return (dx, dw)

    def flops(self, inputs: Types, outputs: Types, attrs: Attrs) -> int:
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


def overruns(x: Tensor, attrs: Attrs) -> bool:
    """Whether torch would write beyond the gradient of a weight: on CPUs it does so for filters of
    one pixel that step over pixels of few channels in channels_last (torch 2.13, AVX2).
    """
    one = attrs["shape"][2:] == (1, 1) and max(attrs["stride"]) > 1
    return x.device.type == "cpu" and one and x.shape[1] < 8 and not x.is_contiguous()


def leaves_unwritten(shape: Sequence[int], dtype: torch.dtype, attrs: Attrs) -> bool:
    """Whether torch on a CPU may leave some taps of the gradient of a weight as the memory was, for
    an image of that shape: it does in bfloat16 for taps that meet nothing but padding, in filters
    that step over images of one pixel (torch 2.13, 2026-11-28).
    """
    return dtype.itemsize == 2 and not all(all(met) for met in _met(shape, attrs))


def _met(shape: Sequence[int], attrs: Attrs) -> list[list[bool]]:
    """Of the rows and of the columns of a filter, which ever meet a pixel."""
    found = []
    for axis, size in enumerate(shape[2:]):
        taps = attrs["shape"][2 + axis]
        stride, pad, spread = (attrs[key][axis] for key in ("stride", "padding", "dilation"))
        steps = range((size + 2 * pad - spread * (taps - 1) - 1) // stride + 1)
        starts = [tap * spread - pad for tap in range(taps)]
        found.append([any(0 <= start + step * stride < size for step in steps) for start in starts])
    return found


def _all_written(dw: Tensor, x: Tensor, attrs: Attrs) -> Tensor:
    """With zeros for the taps that meet nothing but padding, if torch may not have written them."""
    if dw.device.type != "cpu" or not leaves_unwritten(x.shape, x.dtype, attrs):
        return dw
    rows, columns = (torch.tensor(met) for met in _met(x.shape, attrs))
    return dw.masked_fill_(~(rows[:, None] & columns), 0)


def unread_like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of which torch reads shape and layout only: those of images like `tensor`.

    It is dense, because torch copies an expanded one before it looks at it.
    """
    plain = tensor.is_contiguous()
    layout = torch.contiguous_format if plain else torch.channels_last
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=layout)


class Conv2dGrad(ConvOp):
    """The gradient of the image from dy and the weight, or of the weight from dy and the image. The
    shape of what it makes is an attribute.
    """

    def __init__(self, name: str, *, of_image: bool) -> None:
        self.name, self._of_image = name, of_image

    def _ordered(self, made: Any, other: Any) -> tuple[Any, Any]:
        """Image and weight."""
        return (made, other) if self._of_image else (other, made)

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        dy, other = inputs
        made = TensorType(attrs["shape"], dy.dtype)
        y = self.output_type(*self._ordered(made, other), attrs)
        self.require(y.shape == dy.shape, f"dy has shape {dy.shape}, needs {y.shape}")
        return (made,)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        dy, other = inputs
        if not self._of_image and overruns(other, attrs):
            dy, other = dy.contiguous(), other.contiguous()
        made = unread_like(dy if self._of_image else other, attrs["shape"])
        mask = (self._of_image, not self._of_image)
        dx, dw = convolution_backward(dy, *self._ordered(made, other), attrs, mask)
        return (dx if self._of_image else _all_written(dw, other, attrs),)

    def flops(self, inputs: Types, outputs: Types, attrs: Attrs) -> int:
        return 2 * self.macs(inputs[0], inputs[1] if self._of_image else outputs[0])


OPS: tuple[Op, ...] = (
    Conv2d(),
    Conv2dGrad("conv2d_dgrad", of_image=True),
    Conv2dGrad("conv2d_wgrad", of_image=False),
)
