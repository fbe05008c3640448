"""Sums and means, and the broadcasts that are their gradients."""

from __future__ import annotations

import math

from plantune.base.canonical import Attrs
from plantune.graph.ops.base import Gradient, Gradients, Op, Tensors, Types, broadcasts
from plantune.graph.types import TensorType


class ReduceOp(Op):
    """Reduces the axes `dims`; they stay with size 1 where `keepdim` is true."""

    arity = 1
    flops_per_input = 1

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        (x,) = inputs
        dims = attrs["dims"]
        inside = all(0 <= axis < len(x.shape) for axis in dims) and len(set(dims)) == len(dims)
        self.require(inside and dims != (), f"dims {dims} do not fit {x.shape}")
        self.require(x.is_float, f"needs a floating dtype, got {x.dtype}")
        kept = [1 if axis in dims else size for axis, size in enumerate(x.shape)]
        if not attrs["keepdim"]:
            kept = [size for axis, size in enumerate(x.shape) if axis not in dims]
        return (TensorType(tuple(kept), x.dtype),)


def _spread(grad: Gradient, dy: str) -> str:
    """`dy` of a reduction repeated over the reduced axes."""
    x = grad.type_of(grad.inputs[0])
    kept = tuple(1 if axis in grad.attrs["dims"] else size for axis, size in enumerate(x.shape))
    if grad.type_of(dy).shape != kept:
        dy = grad.emit("reshape", dy, shape=kept)
    return grad.emit("broadcast_to", dy, shape=x.shape)


class Sum(ReduceOp):
    name = "sum"

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return (inputs[0].sum(attrs["dims"], keepdim=attrs["keepdim"]),)

    def gradient(self, grad: Gradient) -> Gradients:
        return (_spread(grad, grad.dy),)


class Mean(ReduceOp):
    name = "mean"

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return (inputs[0].mean(attrs["dims"], keepdim=attrs["keepdim"]),)

    def gradient(self, grad: Gradient) -> Gradients:
        x = grad.type_of(grad.inputs[0])
        count = math.prod(x.shape[axis] for axis in grad.attrs["dims"])
        # Scaled before it is spread: the small tensor costs less.
        return (_spread(grad, grad.emit("affine", grad.dy, alpha=1 / max(count, 1), beta=0.0)),)


class SumTo(Op):
    """Sums to `shape`, the inverse of broadcasting from it: the gradient of a scalar bias."""

    name = "sum_to"
    arity = 1
    flops_per_input = 1

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        (x,) = inputs
        shape = attrs["shape"]
        self.require(broadcasts(shape, x.shape), f"{x.shape} does not sum to {shape}")
        return (TensorType(shape, x.dtype),)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return (inputs[0].sum_to_size(attrs["shape"]),)


class BroadcastTo(Op):
    """Repeats along axes of size 1, and along new leading axes."""

    name = "broadcast_to"
    arity = 1
    flops_per_input = 0
    pointwise = True

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        (x,) = inputs
        shape = attrs["shape"]
        self.require(broadcasts(x.shape, shape), f"{x.shape} does not broadcast to {shape}")
        return (TensorType(shape, x.dtype),)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return (inputs[0].expand(attrs["shape"]),)

    def gradient(self, grad: Gradient) -> Gradients:
        return (grad.emit("sum_to", grad.dy, shape=grad.type_of(grad.inputs[0]).shape),)


OPS: tuple[Op, ...] = (Sum(), Mean(), SumTo(), BroadcastTo())
