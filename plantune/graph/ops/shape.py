"""Ops that move elements and compute nothing."""

from __future__ import annotations

import math
from typing import ClassVar

from plantune.canonical import Attrs
from plantune.graph.ops.base import Gradient, Gradients, Op, Tensors, Types
from plantune.graph.types import TensorType


class MoveOp(Op):
    arity = 1
    flops_per_input = 0


class BlockOp(MoveOp):
    """Moves pixels of blocks to channels, or back as its inverse does."""

    inverse: ClassVar[str]

    def gradient(self, grad: Gradient) -> Gradients:
        return (grad.emit(self.inverse, grad.dy, block=grad.attrs["block"]),)


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


class SpaceToDepth(BlockOp):
    """block x block pixels become channels: channel = (dy * block + dx) * C + c."""

    name = "space_to_depth"
    inverse = "depth_to_space"

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        (x,) = inputs
        b = attrs["block"]
        self.require(len(x.shape) == 4, f"needs rank 4, got {x.shape}")
        n, c, h, w = x.shape
        self.require(b > 0 and h % b == 0 and w % b == 0, f"{h}x{w} does not divide into {b}x{b}")
        return (TensorType((n, c * b * b, h // b, w // b), x.dtype),)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        (x,) = inputs
        b = attrs["block"]
        n, c, h, w = x.shape
        split = x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
        return (split.reshape(n, c * b * b, h // b, w // b),)


class DepthToSpace(BlockOp):
    """The inverse of space_to_depth."""

    name = "depth_to_space"
    inverse = "space_to_depth"

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        (x,) = inputs
        b = attrs["block"]
        self.require(len(x.shape) == 4, f"needs rank 4, got {x.shape}")
        n, c, h, w = x.shape
        self.require(b > 0 and c % (b * b) == 0, f"{c} channels do not divide by {b}x{b}")
        return (TensorType((n, c // (b * b), h * b, w * b), x.dtype),)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        (x,) = inputs
        b = attrs["block"]
        n, c, h, w = x.shape
        split = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
        return (split.reshape(n, c // (b * b), h * b, w * b),)


OPS: tuple[Op, ...] = (Reshape(), Permute(), SpaceToDepth(), DepthToSpace())
