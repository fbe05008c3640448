"""Rewrites of a layer graph that keep its meaning."""

from __future__ import annotations

from dataclasses import replace

from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph, Node


def without_dead_nodes(graph: Graph) -> Graph:
    """The graph without nodes, parameters and buffers on which no result depends."""
    needed = set(graph.results)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    needed.update(target for target, _ in graph.updates)
    start = graph.backward_from
    if start is not None:
        start = sum(node.name not in graph.backward_nodes for node in kept)
    return replace(
        graph,
        nodes=tuple(reversed(kept)),
        backward_from=start,
        parameters=tuple(pair for pair in graph.parameters if pair[0] in needed),
        buffers=tuple(pair for pair in graph.buffers if pair[0] in needed),
    )


def fold_scales(graph: Graph) -> Graph:
    """Moves a constant channel scale behind a convolution into the convolution's weight.

    conv(x, w) * s becomes conv(x, w * s): the scaled weight is constant, so it is computed when a
    weight changes and not in every call.
    """
    builder = GraphBuilder.extending(replace(graph, nodes=(), outputs=(), updates=()))
    builder.updates = list(graph.updates)
    folded = {node.name: scale for node in graph.nodes if (scale := _scale_behind(graph, node))}
    renamed: dict[str, str] = {}
    # A scale is made after its convolution: what follows from weights alone goes first.
    for node in sorted(graph.nodes, key=lambda node: not graph.constants.issuperset(node.outputs)):
        inputs = [renamed.get(value, value) for value in node.inputs]
        place = node.name.rpartition("/")[0]
        if node.name in folded:
            factor = folded[node.name].inputs[1]
            inputs[1] = builder.emit(
                "mul_channel", inputs[1], renamed.get(factor, factor), place=place, axis=0
            )[0]
        elif node.name in {scale.name for scale in folded.values()}:
            renamed[node.name] = inputs[0]
            continue
        outputs = builder.emit(node.op, *inputs, place=place, **node.attrs)
        renamed.update(zip(node.outputs, outputs, strict=True))
    builder.updates = [(buffer, renamed.get(value, value)) for buffer, value in graph.updates]
    return builder.build(tuple(renamed.get(value, value) for value in graph.outputs))


def _scale_behind(graph: Graph, node: Node) -> Node | None:
    """The constant channel scale that alone reads this convolution."""
    readers = graph.consumers[node.name]
    if node.op != "conv2d" or len(readers) != 1 or node.name in graph.results:
        return None
    (scale,) = readers
    constant = scale.inputs[-1] in graph.constants and node.inputs[1] in graph.constants
    by_channel = scale.op == "mul_channel" and scale.attrs["axis"] == 1
    return scale if constant and by_channel and scale.inputs[0] == node.name else None
