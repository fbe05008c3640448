"""Conversion of numbers to another dtype."""

from __future__ import annotations

from plantune.base.canonical import Attrs
from plantune.graph.ops.base import Gradient, Gradients, Op, Tensors, Types
from plantune.graph.types import DTYPES, TensorType

# The attribute of a cast that is not in the user's code: of autocast's, of one with which torch
# combines two dtypes, and of their gradients. Digests of graphs and steps do not hold it.
INSERTED = "inserted"


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
        mark = {INSERTED: True} if INSERTED in grad.attrs else {}
        return (grad.emit("cast", grad.dy, dtype=x.dtype, **mark) if x.is_float else None,)


OPS: tuple[Op, ...] = (Cast(),)
