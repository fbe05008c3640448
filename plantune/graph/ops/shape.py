"""Ops that move elements and compute nothing."""

from __future__ import annotations

import math

from plantune.base.canonical import Attrs
from plantune.graph.ops.base import Gradient, Gradients, Op, Tensors, Types
from plantune.graph.types import TensorType


class MoveOp(Op):
    arity = 1
    flops_per_input = 0


class Reshape(MoveOp):
    """The same elements in row-major order under another shape."""

    name = "reshape"

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        (x,) = inputs
        shape = attrs["shape"]
        self.require(math.prod(shape) == x.numel, f"{x.shape} does not reshape to {shape}")
        return (TensorType(shape, x.dtype),)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return (inputs[0].reshape(attrs["shape"]),)

    def gradient(self, grad: Gradient) -> Gradients:
        return (grad.emit("reshape", grad.dy, shape=grad.type_of(grad.inputs[0]).shape),)


class Permute(MoveOp):
    """Axis i of the output is axis dims[i] of the input."""

    name = "permute"

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        (x,) = inputs
        dims = attrs["dims"]
        is_order = sorted(dims) == list(range(len(x.shape)))
        self.require(is_order, f"dims {dims} are not a permutation of the axes of {x.shape}")
        return (TensorType(tuple(x.shape[axis] for axis in dims), x.dtype),)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return (inputs[0].permute(attrs["dims"]),)

    def gradient(self, grad: Gradient) -> Gradients:
        dims = grad.attrs["dims"]
        inverse = tuple(dims.index(axis) for axis in range(len(dims)))
        return (grad.emit("permute", grad.dy, dims=inverse),)


class Blocks(MoveOp):
    """Pixels of block x block become channels, or back: channel = (dy * block + dx) * C + c."""

    def __init__(self, *, to_depth: bool) -> None:
        names = ("space_to_depth", "depth_to_space")
        self.name, self._inverse = names if to_depth else names[::-1]
        self._to_depth = to_depth

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        (x,) = inputs
        b = attrs["block"]
        self.require(len(x.shape) == 4, f"needs rank 4, got {x.shape}")
        n, c, h, w = x.shape
        if self._to_depth:
            fits = b > 0 and h % b == 0 and w % b == 0
            self.require(fits, f"{h}x{w} does not divide into {b}x{b}")
            return (TensorType((n, c * b * b, h // b, w // b), x.dtype),)
        self.require(b > 0 and c % (b * b) == 0, f"{c} channels do not divide by {b}x{b}")
        return (TensorType((n, c // (b * b), h * b, w * b), x.dtype),)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        (x,) = inputs
        b = attrs["block"]
        n, c, h, w = x.shape
        if self._to_depth:
            split = x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
            return (split.reshape(n, c * b * b, h // b, w // b),)
        split = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
        return (split.reshape(n, c // (b * b), h * b, w * b),)

    def gradient(self, grad: Gradient) -> Gradients:
        return (grad.emit(self._inverse, grad.dy, block=grad.attrs["block"]),)


OPS: tuple[Op, ...] = (Reshape(), Permute(), Blocks(to_depth=True), Blocks(to_depth=False))
