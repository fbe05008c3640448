"""What the backward pass computes anew instead of reading what the forward pass kept."""

from __future__ import annotations

from dataclasses import replace

from plantune.graph.graph import Graph, Node, output_names
from plantune.graph.ops import op_named

# As quick as reading the result, and part of the kernels that read it.
ARITHMETIC = frozenset(("add", "add_channel", "affine", "cast", "div", "mul", "mul_channel", "sub"))
SUMS = frozenset(("mean", "sum", "sum_to"))


def recomputed(graph: Graph) -> Graph:
    """The graph whose backward pass has nodes of its own for kept values that cost nothing.

    Such a value follows from another that is kept anyway by arithmetic with constants, and all that
    read it in the backward pass are ops that share a kernel with it. So the forward pass writes
    less, and may compute the value within a larger kernel. An input is read only if the backward
    pass reads it anyway: its owner may overwrite it where eager has kept what followed from it.
    """
    chosen = frozenset(value for value in graph.saved if _costs_nothing(graph, value))
    return _Again(graph, chosen).graph() if chosen else graph


def _costs_nothing(graph: Graph, value: str) -> bool:
    node = graph.producers.get(value)
    if node is None or not _follows(graph, node):
        return False
    readers = [n for n in graph.consumers[value] if n.name in graph.backward_nodes]
    return all(reader.op in SUMS or op_named(reader.op).pointwise for reader in readers)


def _follows(graph: Graph, node: Node) -> bool:
    """Whether it is computed from one value that is there in the backward pass."""
    read = [value for value in node.inputs if value not in graph.constants]
    if len(read) != 1 or node.op not in ARITHMETIC:
        return False
    (value,) = read
    maker = graph.producers.get(value)
    return value in graph.saved or (maker is not None and _follows(graph, maker))


class _Again:
    """Puts each chosen value's node once more before the first backward node that reads it."""

    def __init__(self, graph: Graph, chosen: frozenset[str]) -> None:
        self._graph, self._chosen = graph, chosen
        self._there = (set(graph.saved) | graph.constants) - chosen
        self._names = set(graph.types)
        self._now: dict[str, str] = {}
        self._nodes: list[Node] = []

    def graph(self) -> Graph:
        start = self._graph.backward_from
        self._nodes = list(self._graph.nodes[:start])
        for node in self._graph.nodes[start:]:
            inputs = tuple(self._anew(v) if v in self._chosen else v for v in node.inputs)
            self._nodes.append(replace(node, inputs=inputs))
        return replace(self._graph, nodes=tuple(self._nodes))

    def _anew(self, value: str) -> str:
        if value not in self._now:
            node = self._graph.producers[value]
            inputs = tuple(v if v in self._there else self._anew(v) for v in node.inputs)
            name = f"{node.name}/again"
            while name in self._names:
                name += "_"
            self._names.update(output_names(name, len(node.types)))
            self._nodes.append(replace(node, name=name, inputs=inputs))
            self._now[value] = name
        return self._now[value]
