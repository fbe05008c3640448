"""ReLUs whose results are kept with a scalar added, and not without it."""

from __future__ import annotations

from dataclasses import replace

from plantune.graph.graph import Graph, Node
from plantune.graph.ops.pointwise import numbers_apart


def with_sums_apart(graph: Graph) -> Graph:
    """The graph of both passes in which a ReLU's gradient reads the ReLU's result plus a scalar,
    where the backward pass reads that anyway: the result alone is then not kept.

    Rounded as usual it would say zero of all that is small beside the scalar, which moved gradients
    of se_resnet9's weights by 1 %. So the sum is made by `add_apart`. Of 16 bits, as on a GPU.
    """
    changed: dict[str, Node] = {}
    for relu in graph.nodes:
        added = _sum_of(graph, relu) if relu.op == "relu" else None
        if added is not None:
            _, number = added.inputs
            attrs = numbers_apart(added.types[0].torch_dtype)
            changed[added.name] = replace(added, op="add_apart", attrs=attrs)
            for grad in _gradients(graph, relu):
                inputs = (grad.inputs[0], added.name, number)
                changed[grad.name] = replace(grad, op="apart_grad", inputs=inputs)
    if not changed:
        return graph
    return replace(graph, nodes=tuple(changed.get(node.name, node) for node in graph.nodes))


def _sum_of(graph: Graph, relu: Node) -> Node | None:
    """The sum that can stand for the result of a ReLU."""
    if relu.types[0].torch_dtype.itemsize != 2 or relu.name in graph.results:
        return None
    gradients = _gradients(graph, relu)
    others = [node for node in graph.consumers[relu.name] if node not in gradients]
    if not gradients or len(others) != 1 or others[0].op != "add":
        return None
    (added,) = others
    x, number = added.inputs
    scalar = graph.types[number].numel == 1 and number in graph.constants
    kept = added.name in graph.saved
    return added if x == relu.name and scalar and kept else None


def _gradients(graph: Graph, relu: Node) -> list[Node]:
    """Those of the ReLU that read its result, and nothing but its sign."""
    return [
        node
        for node in graph.consumers[relu.name]
        if node.op == "relu_grad" and node.inputs[0] != relu.name
    ]
