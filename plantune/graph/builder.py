"""Builds a layer graph node by node; types are inferred, names made unique."""

from __future__ import annotations

from typing import Any

from plantune.base.canonical import Attrs
from plantune.graph.graph import Graph, Node, output_names
from plantune.graph.ops import op_named
from plantune.graph.types import TensorType


class GraphBuilder:
    """Collects sources and nodes; `build` freezes them."""

    def __init__(self) -> None:
        self.types: dict[str, TensorType] = {}
        self.inputs: list[tuple[str, TensorType]] = []
        self.parameters: list[tuple[str, TensorType]] = []
        self.buffers: list[tuple[str, TensorType]] = []
        self.nodes: list[Node] = []
        self.updates: list[tuple[str, str]] = []
        self.reserved: frozenset[str] = frozenset()
        """Names that no node may take: of sources that are declared later."""

    @staticmethod
    def extending(graph: Graph) -> GraphBuilder:
        """A builder that goes on where a forward graph ends."""
        builder = GraphBuilder()
        builder.types = dict(graph.types)
        builder.inputs = list(graph.inputs)
        builder.parameters = list(graph.parameters)
        builder.buffers = list(graph.buffers)
        builder.nodes = list(graph.nodes)
        builder.updates = list(graph.updates)
        return builder

    def input(self, name: str, type_: TensorType) -> str:
        self.inputs.append((name, type_))
        return self.declare(name, type_)

    def parameter(self, name: str, type_: TensorType) -> str:
        self.parameters.append((name, type_))
        return self.declare(name, type_)

    def buffer(self, name: str, type_: TensorType) -> str:
        self.buffers.append((name, type_))
        return self.declare(name, type_)

    def declare(self, name: str, type_: TensorType) -> str:
        """A source; by itself one of another kind, such as the gradient of an output."""
        self.types[name] = type_
        return name

    def emit(self, op: str, *inputs: str, place: str = "", **attrs: Any) -> tuple[str, ...]:
        """Adds a node named after `place` and its op; returns the names of its outputs."""
        frozen = Attrs(attrs)
        types = tuple(op_named(op).infer([self.types[value] for value in inputs], frozen))
        name = self._unique(f"{place}/{op}" if place else op)
        self.nodes.append(Node(name, op, inputs, types, frozen))
        outputs = output_names(name, len(types))
        self.types.update(zip(outputs, types, strict=True))
        return outputs

    def amend(self, node: Node, **attrs: Any) -> str:
        """Gives a node more attributes, by which it has one more output; returns that."""
        frozen = Attrs({**node.attrs, **attrs})
        types = tuple(op_named(node.op).infer([self.types[v] for v in node.inputs], frozen))
        amended = Node(node.name, node.op, node.inputs, types, frozen)
        self.nodes = [amended if each is node else each for each in self.nodes]
        self.types[amended.outputs[-1]] = types[-1]
        return amended.outputs[-1]

    def _unique(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self.types or name in self.reserved:
            count += 1
            name = f"{wanted}_{count}"
        return name

    def build(self, outputs: tuple[str, ...], **backward: Any) -> Graph:
        return Graph(
            inputs=tuple(self.inputs),
            parameters=tuple(self.parameters),
            buffers=tuple(self.buffers),
            nodes=tuple(self.nodes),
            outputs=outputs,
            updates=tuple(self.updates),
            **backward,
        )
