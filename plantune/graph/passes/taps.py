"""Max pools whose winners are kept as bytes: their numbers within windows, not within images."""

from __future__ import annotations

import math
from dataclasses import replace

from plantune.graph.graph import Graph, Node
from plantune.graph.ops.pool import MOST_TAPS
from plantune.graph.types import TensorType

OF_TAPS = {"max_pool2d": "max_pool2d_taps", "max_pool2d_grad": "max_pool2d_taps_grad"}


def with_taps(graph: Graph) -> Graph:
    """The graph of both passes in which max pools of 16 bits keep taps where gradients alone read
    them: 64 bits for each element of 16 would be most of what such a pool writes.

    Those of other types are left as they are: on a CPU torch has kernels for places alone.
    """
    nodes = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        if node.op == "max_pool2d" and _can_keep_taps(graph, node):
            y, _ = node.types
            types = (y, TensorType(y.shape, "uint8"))
            for other in (node, *graph.consumers[node.outputs[1]]):
                nodes[other.name] = replace(other, op=OF_TAPS[other.op])
            nodes[node.name] = replace(nodes[node.name], types=types)
    return replace(graph, nodes=tuple(nodes.values()))


def _can_keep_taps(graph: Graph, pool: Node) -> bool:
    places = pool.outputs[1]
    readers = graph.consumers[places]
    return (
        pool.types[0].torch_dtype.itemsize == 2
        and math.prod(pool.attrs["kernel"]) <= MOST_TAPS
        and places not in graph.results
        and bool(readers)
        and all(reader.op == "max_pool2d_grad" for reader in readers)
    )
