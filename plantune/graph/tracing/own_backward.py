"""Reads the backward pass of a torch.autograd.Function into a graph of its own."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plantune.base.canonical import canonical
from plantune.graph.memory import memory_of
from plantune.graph.passes.rewrite import without_dead_nodes
from plantune.graph.spelling import Value
from plantune.graph.tracing.extraction import Extraction
from plantune.graph.tracing.records import Derivative
from plantune.graph.tracing.trace import Trace
from plantune.graph.types import TensorType, dtype_name


def read_own_backward(
    outer: Extraction, derivative: Derivative
) -> tuple[str, tuple[Value, ...], tuple[int, ...]]:
    """See `ReadBackward`."""
    return _OwnBackward(outer, derivative).whole()


class _OwnBackward(Extraction):
    """Its inputs are the gradients of what the Function made, then those values of the forward pass
    that it reads, in the order in which it first does.
    """

    def __init__(self, outer: Extraction, derivative: Derivative) -> None:
        types = (TensorType(tuple(t.shape), dtype_name(t.dtype)) for t in derivative.seeds)
        found = tuple(g for g in derivative.gradients if g is not None)
        inner = Trace(derivative.records, outer.traced.state, derivative.seeds, found, None)
        super().__init__(outer.module, tuple(types), inner, outer.read_backward)
        for seed in derivative.seeds:  # it may write to them: no other reads these
            del self.owners[memory_of(seed).storage]
        self._outer, self._derivative = outer, derivative
        # The names of inputs by those of the values of the forward pass.
        self._read_of_outer: dict[str, str] = {}

    def whole(self) -> tuple[str, tuple[Value, ...], tuple[int, ...]]:
        """The graph as text, empty if there is no gradient; what it reads of the forward pass; and
        the places of the inputs that its outputs are gradients of.
        """
        targets = [at for at, g in enumerate(self._derivative.gradients) if g is not None]
        if not targets:
            return "", (), ()
        graph = without_dead_nodes(self.run())
        read = {value for node in graph.nodes for value in node.inputs} | {*graph.outputs}
        kept = {name: inner for name, inner in self._read_of_outer.items() if inner in read}
        seeds = graph.inputs[: len(self._derivative.seeds)]
        captured = tuple((inner, graph.types[inner]) for inner in kept.values())
        graph = replace(graph, inputs=(*seeds, *captured))
        return canonical(graph.identity), tuple(map(Value, kept)), tuple(targets)

    def _value(self, tensor: Tensor) -> Value:
        memory = memory_of(tensor)
        value = self.known.get(id(tensor), self.newest.get(memory))
        if value is None:
            value = self._captured(self._outer._value(tensor))
            self._know(tensor, value)
        return value

    def _state(self, name: str) -> Value:
        return self._captured(self._outer._state(name))

    def _captured(self, value: Value) -> Value:
        if value.name not in self._read_of_outer:
            name = f"x{len(self.builder.inputs)}"
            self._read_of_outer[value.name] = self._input(name, self._outer.type_of(value))
        return Value(self._read_of_outer[value.name])
