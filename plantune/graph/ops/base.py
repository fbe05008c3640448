"""The interface of an op, and what a backward rule may use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.errors import InvalidGraph
from plantune.graph.types import TensorType

if TYPE_CHECKING:
    from plantune.graph.builder import GraphBuilder
    from plantune.graph.graph import Node

Types = Sequence[TensorType]
Tensors = Sequence[Tensor]
Gradients = tuple[str | None, ...]


@dataclass(frozen=True)
class Domain:
    """The numbers an input may hold, so that a check can draw them: real, positive, of the unit
    interval, or an index. `draw` makes them where not every index below `below` makes sense.
    """

    kind: str = "real"
    below: int = 0
    draw: Callable[[torch.Generator], Tensor] | None = None


class Gradient:
    """What a backward rule sees of the node it differentiates, and how it emits nodes."""

    def __init__(
        self,
        builder: GraphBuilder,
        node: Node,
        output_gradients: tuple[str | None, ...],
        needed: Collection[str],
    ) -> None:
        self._builder, self._node, self._needed = builder, node, needed
        self.inputs, self.outputs, self.attrs = node.inputs, node.outputs, node.attrs
        self.output_gradients = output_gradients

    @property
    def dy(self) -> str:
        """The gradient of the first output."""
        first = self.output_gradients[0]
        assert first is not None
        return first

    def needs(self, position: int) -> bool:
        """Whether the gradient of that input is asked for."""
        return self.inputs[position] in self._needed

    def type_of(self, value: str) -> TensorType:
        """The type of a value of the graph."""
        return self._builder.types[value]

    def remember(self, **attrs: Any) -> str:
        """Gives the forward node these attributes too; the output that it has by them."""
        return self._builder.amend(self._node, **attrs)

    def emit(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Adds a backward node and returns its first output."""
        return self.emit_all(op, *inputs, **attrs)[0]

    def emit_all(self, op: str, *inputs: str, **attrs: Any) -> tuple[str, ...]:
        """Adds a backward node and returns all its outputs."""
        return self._builder.emit(op, *inputs, place=f"d({self._node.name})", **attrs)


class Op(ABC):
    """One operation: pure, without state; every output is a new value."""

    name: str
    arity: int | None
    """None if nodes differ in it."""
    pointwise: ClassVar[bool] = False
    # Whether it may sum products, whose factors of float32 torch may round.
    multiplies: ClassVar[bool] = False
    # The inputs that hold no number up to zero, such as variances.
    positive: ClassVar[Collection[int]] = ()
    # Arithmetic per element of the first input; if None, one per element of the outputs.
    flops_per_input: ClassVar[int | None] = None

    @abstractmethod
    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        """Types of the outputs; raises InvalidGraph if the inputs do not fit."""

    @abstractmethod
    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        """The op's meaning in torch, in the dtype of its inputs: the reference in float64."""

    def reads(self, attrs: Attrs) -> bool:
        """Whether the inputs' numbers matter; else one of them only says where to make a result."""
        return True

    def differentiates(self, wanted: Sequence[int], inputs: Types, attrs: Attrs) -> bool:
        """Whether there is a gradient of one of the inputs in `wanted`."""
        return True

    def gradient(self, grad: Gradient) -> Gradients:
        """Emits the backward nodes; one gradient per input, None if none is needed or exists."""
        raise NotImplementedError(f"op {self.name} has no backward rule")

    def domain(self, position: int, inputs: Types, attrs: Attrs) -> Domain:
        """What input number `position` may hold."""
        return Domain("positive" if position in self.positive else "real")

    def flops(self, inputs: Types, outputs: Types, attrs: Attrs) -> int:
        """Arithmetic of one call; a multiply-add counts two."""
        if self.flops_per_input is not None:
            return self.flops_per_input * inputs[0].numel
        return sum(out.numel for out in outputs)

    def require(self, holds: bool, message: str) -> None:
        """Raises InvalidGraph with the op's name where `holds` is false."""
        if not holds:
            raise InvalidGraph(f"{self.name}: {message}")


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape broadcasts to another."""
    pairs = zip(reversed(to), reversed(shape), strict=False)
    return len(shape) <= len(to) and all(size in (1, other) for other, size in pairs)


class PointwiseOp(Op):
    """Every output element depends on the elements at its own place only."""

    pointwise = True
    arity = 1

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        first = inputs[0]
        for other in inputs[1:]:
            self.require(other == first, f"inputs differ: {first} and {other}")
        return (TensorType(first.shape, first.dtype),)
