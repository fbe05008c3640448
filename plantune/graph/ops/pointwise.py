"""Pointwise ops: arithmetic with broadcasting. Functions of one number stand in `functions.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.graph.ops.base import (
    Gradient,
    Gradients,
    Op,
    PointwiseOp,
    Tensors,
    Types,
    broadcasts,
)
from plantune.graph.types import TensorType


class BroadcastOp(Op):
    """Two inputs; the second is broadcast to the first, which has the shape of the output."""

    pointwise = True
    arity = 2

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        x, y = inputs
        self.require(x.dtype == y.dtype, f"dtypes differ: {x.dtype} and {y.dtype}")
        fits = broadcasts(y.shape, x.shape)
        self.require(fits, f"shape {y.shape} does not broadcast to {x.shape}")
        return (TensorType(x.shape, x.dtype),)


def _to_shape_of(grad: Gradient, gradient: str, position: int) -> str:
    """`gradient` summed over the axes along which input `position` was broadcast."""
    wanted = grad.type_of(grad.inputs[position]).shape
    if grad.type_of(gradient).shape == wanted:
        return gradient
    return grad.emit("sum_to", gradient, shape=wanted)


class Add(BroadcastOp):
    name = "add"

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return (inputs[0] + inputs[1],)

    def gradient(self, grad: Gradient) -> Gradients:
        dy = grad.dy
        return (dy, _to_shape_of(grad, dy, 1) if grad.needs(1) else None)


class AddApart(BroadcastOp):
    """x + y, but where x is above zero at least y's next neighbour: what remains of x says whether
    it is above zero, however it is rounded. `step` is how far apart numbers of the result's dtype
    are, of their size, and `least` how far at least.
    """

    name = "add_apart"

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        x, y = inputs
        next_ = y + (y.abs() * attrs["step"]).clamp(min=attrs["least"])
        z = x + y
        return (torch.where((x > 0) & (z < next_), next_, z),)


def numbers_apart(dtype: torch.dtype) -> Attrs:
    """How far apart numbers of a dtype are, as `add_apart` asks for it."""
    found = torch.finfo(dtype)
    least = max(found.smallest_normal * found.eps, torch.finfo(torch.float32).smallest_normal)
    return Attrs(step=found.eps, least=least)


class ApartGrad(BroadcastOp):
    """The gradient of a ReLU whose result a scalar was added to by `add_apart`: of dy, the sum and
    the scalar.
    """

    name = "apart_grad"
    arity = 3

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        dy, z, y = inputs
        self.require(dy == z, f"inputs differ: {dy} and {z}")
        return super().infer((z, y), attrs)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        dy, z, y = inputs
        return (torch.where(z <= y, 0, dy),)


class Sub(BroadcastOp):
    name = "sub"

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return (inputs[0] - inputs[1],)

    def gradient(self, grad: Gradient) -> Gradients:
        dy = grad.dy
        if not grad.needs(1):
            return (dy, None)
        summed = _to_shape_of(grad, dy, 1)
        return (dy, grad.emit("affine", summed, alpha=-1.0, beta=0.0))


class Mul(BroadcastOp):
    name = "mul"

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return (inputs[0] * inputs[1],)

    def gradient(self, grad: Gradient) -> Gradients:
        dy = grad.dy
        x, y = grad.inputs
        dx = grad.emit("mul", dy, y) if grad.needs(0) else None
        return (dx, _to_shape_of(grad, grad.emit("mul", dy, x), 1) if grad.needs(1) else None)


class Div(BroadcastOp):
    name = "div"
    positive = (1,)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return (inputs[0] / inputs[1],)

    def gradient(self, grad: Gradient) -> Gradients:
        dx = grad.emit("div", grad.dy, grad.inputs[1])
        if not grad.needs(1):
            return (dx, None)
        summed = _to_shape_of(grad, grad.emit("mul", dx, grad.outputs[0]), 1)
        return (dx, grad.emit("affine", summed, alpha=-1.0, beta=0.0))


class ChannelOp(Op):
    """Combines a tensor with one value per index of `axis`: a channel bias or scale."""

    pointwise = True
    arity = 2

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        x, channel = inputs
        axis = attrs["axis"]
        self.require(x.dtype == channel.dtype, f"dtypes differ: {x.dtype} and {channel.dtype}")
        self.require(0 <= axis < len(x.shape), f"axis {axis} is outside of {x.shape}")
        self.require(
            channel.shape == (x.shape[axis],),
            f"axis {axis} of {x.shape} needs shape {(x.shape[axis],)}, got {channel.shape}",
        )
        return (TensorType(x.shape, x.dtype),)


def along_axis(channel: Tensor, rank: int, axis: int) -> Tensor:
    """A one-dimensional tensor shaped to broadcast along `axis` of a tensor of that rank."""
    return channel.view([-1 if i == axis else 1 for i in range(rank)])


def _to_channel(grad: Gradient, gradient: str) -> str:
    """`gradient` summed over all axes but the channel's."""
    rank = len(grad.type_of(gradient).shape)
    dims = tuple(i for i in range(rank) if i != grad.attrs["axis"])
    return grad.emit("sum", gradient, dims=dims, keepdim=False) if dims else gradient


class AddChannel(ChannelOp):
    name = "add_channel"

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        x, bias = inputs
        return (x + along_axis(bias, x.dim(), attrs["axis"]),)

    def gradient(self, grad: Gradient) -> Gradients:
        dy = grad.dy
        return (dy, _to_channel(grad, dy) if grad.needs(1) else None)


class MulChannel(ChannelOp):
    name = "mul_channel"

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        x, scale = inputs
        return (x * along_axis(scale, x.dim(), attrs["axis"]),)

    def gradient(self, grad: Gradient) -> Gradients:
        dy = grad.dy
        x, scale = grad.inputs
        dx = grad.emit("mul_channel", dy, scale, axis=grad.attrs["axis"]) if grad.needs(0) else None
        if not grad.needs(1):
            return (dx, None)
        return (dx, _to_channel(grad, grad.emit("mul", dy, x)))


class Affine(PointwiseOp):
    """x * alpha + beta with constant numbers; integers stay integers."""

    name = "affine"

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        (x,) = inputs
        whole = all(float(attrs[key]).is_integer() for key in ("alpha", "beta"))
        self.require(x.is_float or whole, f"{x.dtype} needs whole numbers, got {attrs}")
        self.require(x.dtype != "bool", "torch makes int64 of bools and a number")
        return super().infer(inputs, attrs)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        (x,) = inputs
        number = float if x.is_floating_point() else int
        return (x * number(attrs["alpha"]) + number(attrs["beta"]),)

    def gradient(self, grad: Gradient) -> Gradients:
        dy = grad.dy
        if grad.attrs["alpha"] == 1.0:
            return (dy,)
        return (grad.emit("affine", dy, alpha=grad.attrs["alpha"], beta=0.0),)


class Rsqrt(PointwiseOp):
    """1 / sqrt(x + eps): the scale of a batch norm in inference."""

    name = "rsqrt"
    positive = (0,)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return (torch.rsqrt(inputs[0] + attrs["eps"]),)


KINDS = (Add, AddApart, ApartGrad, Sub, Mul, Div, AddChannel, MulChannel, Affine, Rsqrt)
OPS: tuple[Op, ...] = tuple(kind() for kind in KINDS)
