"""Adds the backward pass to a layer graph, by one rule per op."""

from __future__ import annotations

from collections.abc import Collection

from plantune.errors import InvalidGraph
from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph, Node
from plantune.graph.ops import Gradient, op_named
from plantune.graph.passes.apart import with_sums_apart
from plantune.graph.passes.own_gradients import without_functions
from plantune.graph.passes.recompute import recomputed
from plantune.graph.passes.taps import with_taps
from plantune.graph.types import TensorType


def gradient_name(output: str) -> str:
    """The name under which the gradient of an output enters the backward pass."""
    return f"d({output})"


def differentiate(graph: Graph, wrt: Collection[str] | None = None) -> Graph:
    """`graph` followed by its backward pass.

    `wrt` names the inputs and parameters whose gradients are asked for; by default all parameters.
    A source that no output depends on has no gradient. What crosses from forward to backward is
    the new graph's `saved`.
    """
    if graph.backward_from is not None:
        raise InvalidGraph("the graph already has a backward pass; there is no double backward")
    asked = {name for name, _ in graph.parameters} if wrt is None else set(wrt)
    # In the graph's order, whatever the order or kind of the collection: one graph, one digest.
    wanted = [name for name, _ in (*graph.parameters, *graph.inputs) if name in asked]
    unknown = asked - set(wanted)
    if unknown:
        raise InvalidGraph(f"no input or parameter is called {', '.join(sorted(unknown))}")
    backward = _Backward(graph, _depending(graph, wanted))
    gradients = tuple(
        (name, found) for name in wanted if (found := backward.total(name)) is not None
    )
    whole = backward.builder.build(
        graph.outputs,
        backward_from=len(graph.nodes),
        output_gradients=tuple(backward.seeds),
        gradients=gradients,
    )
    return with_sums_apart(with_taps(recomputed(without_functions(whole))))


def _depending(graph: Graph, wanted: Collection[str]) -> frozenset[str]:
    """Every value that depends on a wanted source."""
    found = set(wanted)
    for node in graph.nodes:
        places = [at for at, value in enumerate(node.inputs) if value in found]
        types = [graph.types[value] for value in node.inputs]
        if places and op_named(node.op).differentiates(places, types, node.attrs):
            found.update(value for value in node.outputs if graph.types[value].is_float)
    return frozenset(found)


class _Backward:
    """Walks the forward nodes backwards; each rule adds to the gradients of its inputs."""

    def __init__(self, graph: Graph, needed: frozenset[str]) -> None:
        self.builder = GraphBuilder.extending(graph)
        self.needed = needed
        self.parts: dict[str, list[str]] = {}
        self.seeds: list[tuple[str, TensorType]] = []
        for output in dict.fromkeys(graph.outputs):
            if output in needed:
                self._seed(output)
        for node in reversed(graph.nodes):
            self._differentiate(node)

    def _seed(self, output: str) -> None:
        name, type_ = gradient_name(output), self.builder.types[output]
        self.builder.declare(name, type_)
        self.seeds.append((name, type_))
        self.parts[output] = [name]

    def _differentiate(self, node: Node) -> None:
        if self.needed.isdisjoint(node.inputs) or self.needed.isdisjoint(node.outputs):
            return
        output_gradients = tuple(self.total(value) for value in node.outputs)
        if all(gradient is None for gradient in output_gradients):
            return
        rule = Gradient(self.builder, node, output_gradients, self.needed)
        for value, part in zip(node.inputs, op_named(node.op).gradient(rule), strict=True):
            if part is not None and value in self.needed:
                self.parts.setdefault(value, []).append(part)

    def total(self, value: str) -> str | None:
        """The sum of all gradients that reached `value`, made once."""
        parts = self.parts.get(value)
        if not parts:
            return None
        while len(parts) > 1:
            last, before = parts.pop(), parts.pop()
            whole, added = (last, before) if self._spread(before) else (before, last)
            if not self._spread(whole):
                added = self._unspread(added)
            parts.append(self.builder.emit("add", whole, added, place=f"d({value})")[0])
        return parts[0]

    def _spread(self, value: str) -> Node | None:
        """The node that repeats a smaller value, if one makes this value."""
        made = (node for node in reversed(self.builder.nodes) if value in node.outputs)
        node = next(made, None)
        return node if node is not None and node.op == "broadcast_to" else None

    def _unspread(self, value: str) -> str:
        """What was repeated: an addition repeats it itself, without a pass over the whole."""
        node = self._spread(value)
        if node is None:
            return value
        waiting = any(value in parts for parts in self.parts.values())
        if not waiting and not any(value in other.inputs for other in self.builder.nodes):
            self.builder.nodes.remove(node)
        return node.inputs[0]
