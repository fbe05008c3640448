"""Conversion of numbers to another dtype."""

from __future__ import annotations

from plantune.base.canonical import Attrs
from plantune.graph.ops.base import Gradient, Gradients, Op, Tensors, Types
from plantune.graph.types import DTYPES, TensorType


class Cast(Op):
    """The same numbers in the floating `dtype`, rounded if it has fewer digits."""

    name = "cast"
    arity = 1
    pointwise = True

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        made = TensorType(inputs[0].shape, attrs["dtype"])
        self.require(made.is_float, f"makes floating dtypes, not {made.dtype}")
        return (made,)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return (inputs[0].to(DTYPES[attrs["dtype"]], copy=True),)

    def gradient(self, grad: Gradient) -> Gradients:
        x = grad.type_of(grad.inputs[0])
        return (grad.emit("cast", grad.dy, dtype=x.dtype) if x.is_float else None,)


OPS: tuple[Op, ...] = (Cast(),)
