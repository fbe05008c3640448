"""A graph without its names: equal for networks of the same layers, whoever wrote them.

Values are numbered from the results backwards, each node after what it reads, so that neither the
names of attributes nor the order in which independent branches were written counts. Equal
structures are the same graph under other names; where two parts of a graph look alike so much that
only their order tells them apart, that order counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plantune.base.canonical import digest

if TYPE_CHECKING:
    from plantune.graph.graph import Graph, Node, Pairs


@dataclass(frozen=True)
class Structure:
    """The digest, and the names of the nodes in the order of their numbers."""

    digest: str
    nodes: tuple[str, ...]


def structure_of(graph: Graph) -> Structure:
    numbers = _Numbers(graph)
    gradients = numbers.ordered(graph.gradients)
    return Structure(
        digest(
            {
                "inputs": [type_.to_json() for _, type_ in graph.inputs],
                "output_gradients": [type_.to_json() for _, type_ in graph.output_gradients],
                "state": numbers.state(),
                "nodes": numbers.rows(),
                "outputs": [numbers.of[value] for value in graph.outputs],
                "updates": numbers.ordered(graph.updates),
                "gradients": None if graph.backward_from is None else gradients,
            }
        ),
        tuple(node.name for node in numbers.nodes),
    )


class _Numbers:
    """`of` holds the number of each value; parameters and buffers get theirs when they are read."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.of: dict[str, str] = {}
        self.nodes: list[Node] = []
        self._state: list[str] = []
        for kind, named in (("x", graph.inputs), ("dy", graph.output_gradients)):
            self.of.update({name: f"{kind}{at}" for at, (name, _) in enumerate(named)})
        self._visit(graph.outputs)
        self._visit(self._targets())
        alike = _looks(graph, self.of)
        self._visit(value for _, value in sorted(graph.updates, key=lambda pair: alike[pair[1]]))
        self._visit(name for node in graph.nodes for name in node.outputs)
        self._visit(name for name, _ in (*graph.parameters, *graph.buffers))

    def _targets(self) -> Iterable[str]:
        """The gradients, in the order in which the forward pass reads what they are of."""
        self._visit(target for target, _ in self.graph.gradients)
        order = {name: place for place, name in enumerate(self.of)}
        by_target = sorted(self.graph.gradients, key=lambda pair: order[pair[0]])
        return [value for _, value in by_target]

    def _visit(self, values: Iterable[str]) -> None:
        for value in values:
            waiting = [value]
            while waiting:
                self._visit_last(waiting)

    def _visit_last(self, waiting: list[str]) -> None:
        """Numbers the last value if all that it needs is numbered; else that waits before it."""
        value = waiting[-1]
        node = self.graph.producers.get(value)
        missing = () if node is None else [name for name in node.inputs if name not in self.of]
        if value not in self.of and missing:
            waiting.extend(reversed(missing))
            return
        waiting.pop()
        if value in self.of:
            return
        if node is None:
            self.of[value] = f"w{len(self._state)}"
            self._state.append(value)
            return
        self.of.update({name: f"n{len(self.nodes)}:{at}" for at, name in enumerate(node.outputs)})
        self.nodes.append(node)

    def state(self) -> list[Any]:
        """Parameters and buffers, in order."""
        parameters = {name for name, _ in self.graph.parameters}
        types = self.graph.types
        return [[name in parameters, types[name].to_json()] for name in self._state]

    def rows(self) -> list[Any]:
        backward = self.graph.backward_nodes
        return [
            [
                node.op,
                [self.of[value] for value in node.inputs],
                [type_.to_json() for type_ in node.types],
                node.identity,
                node.name in backward,
            ]
            for node in self.nodes
        ]

    def ordered(self, pairs: Pairs) -> list[tuple[str, str]]:
        return sorted((self.of[target], self.of[value]) for target, value in pairs)


def _looks(graph: Graph, known: dict[str, str]) -> dict[str, str]:
    """What tells values apart before all are numbered: how each is computed, from what."""
    kinds = {name: kind for kind in ("parameters", "buffers") for name, _ in getattr(graph, kind)}
    looks = {
        name: known.get(name) or digest([kinds.get(name), type_.to_json()])
        for name, type_ in graph.sources
    }
    for node in graph.nodes:
        if node.name in known:
            looks.update({name: known[name] for name in node.outputs})
            continue
        types = [type_.to_json() for type_ in node.types]
        made = digest([node.op, [looks[value] for value in node.inputs], node.identity, types])
        looks.update({name: f"{made}:{at}" for at, name in enumerate(node.outputs)})
    return looks
