"""Functions with a backward of their own, in a graph that has its backward pass already."""

from __future__ import annotations

from dataclasses import replace

from plantune.graph.graph import Graph, Node
from plantune.graph.ops.own_gradient import IDENTITY, OWN_GRADIENT
from plantune.graph.passes.rewrite import without_dead_nodes


def without_functions(graph: Graph) -> Graph:
    """The graph in which what reads a Function's result reads what its forward made. Results that
    leave the graph are copies: each has a gradient of its own.
    """
    if all(node.op != OWN_GRADIENT for node in graph.nodes):
        return graph
    names: dict[str, str] = {}
    # What those values are that no gradient was to pass.
    attached: dict[str, str] = {}
    nodes: list[Node] = []
    start = 0
    for node in graph.nodes:
        inputs = tuple(names.get(value, value) for value in node.inputs)
        if node.op == OWN_GRADIENT:
            made = tuple(attached.get(value, value) for value in inputs[: len(node.types)])
            names.update(zip(node.outputs, made, strict=True))
            if graph.results.isdisjoint(node.outputs):
                continue
            nodes.append(Node(node.name, IDENTITY, made, node.types))
        else:
            if node.op == "aten.detach.default":
                attached[node.name] = attached.get(inputs[0], inputs[0])
            nodes.append(replace(node, inputs=inputs))
        start += node.name not in graph.backward_nodes
    return without_dead_nodes(replace(graph, nodes=tuple(nodes), backward_from=start))
