"""Conversion of numbers to another dtype."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plantune.canonical import Attrs
from plantune.graph.ops.base import Gradient, Op, Types
from plantune.graph.types import DTYPES, TensorType


class Cast(Op):
    """The same numbers in the floating `dtype`, rounded where it has fewer digits."""

    name = "cast"
    arity = 1
    pointwise = True

    def infer(self, inputs: Sequence[TensorType], attrs: Attrs) -> Types:
        made = TensorType(inputs[0].shape, attrs["dtype"])
        self.require(made.is_float, f"makes floating dtypes, not {made.dtype}")
        return (made,)

    def evaluate(self, inputs: Sequence[Tensor], attrs: Attrs) -> tuple[Tensor, ...]:
        return (inputs[0].to(DTYPES[attrs["dtype"]], copy=True),)

    def gradient(self, grad: Gradient) -> tuple[str | None, ...]:
        (dy,) = grad.output_gradients
        assert dy is not None
        x = grad.type_of(grad.inputs[0])
        return (grad.emit("cast", dy, dtype=x.dtype) if x.is_float else None,)


OPS: tuple[Op, ...] = (Cast(),)
