"""The gradient that a torch.autograd.Function computes itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from plantune.base.canonical import Attrs, canonical
from plantune.graph.ops.base import Gradient, Op, Types

if TYPE_CHECKING:
    from plantune.graph.graph import Graph, Node

OWN_GRADIENT, IDENTITY = "own_gradient", "identity"


class Identity(Op):
    """Copies of its inputs, as results that other values of the network are kept apart from."""

    name = IDENTITY
    arity = None

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        return tuple(inputs)

    def evaluate(self, inputs: Sequence[Tensor], attrs: Attrs) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in inputs)


class OwnGradient(Op):
    """Reads the `count` tensors that a Function made, the tensors that it made them of, and what
    its backward pass reads; its results are the first ones, through which only that pass gives
    gradients. `backward` is the pass as a graph: of the gradients of the results, and of what it
    reads, it makes those of the inputs at the places `targets`.

    It stands in a graph until the backward pass is added (plantune/graph/passes/differentiate.py).
    """

    name = OWN_GRADIENT
    arity = None
    multiplies = True

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        return tuple(inputs[: attrs["count"]])

    def evaluate(self, inputs: Sequence[Tensor], attrs: Attrs) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in inputs[: attrs["count"]])

    def differentiates(self, wanted: Sequence[int], inputs: Types, attrs: Attrs) -> bool:
        count = attrs["count"]
        return any(count <= at < count + attrs["inputs"] and inputs[at].is_float for at in wanted)

    def gradient(self, grad: Gradient) -> tuple[str | None, ...]:
        found: list[str | None] = [None] * len(grad.inputs)
        count, targets = grad.attrs["count"], grad.attrs["targets"]
        if not targets:
            return tuple(found)
        graph = _backward(grad.attrs["backward"])
        wanted = [at for at, target in enumerate(targets) if grad.needs(count + target)]
        nodes = _needed(graph, [graph.outputs[at] for at in wanted])
        values = dict(zip(map(_first, graph.inputs), _given(grad, graph, nodes), strict=True))
        for node in nodes:
            made = grad.emit_all(node.op, *(values[name] for name in node.inputs), **node.attrs)
            values.update(zip(node.outputs, made, strict=True))
        for at in wanted:
            name = graph.outputs[at]
            is_made = name in graph.producers or values[name] in grad.output_gradients
            found[count + targets[at]] = (
                values[name] if is_made else grad.emit(IDENTITY, values[name])
            )
        return tuple(found)


OPS = (Identity(), OwnGradient())


def _given(grad: Gradient, graph: Graph, nodes: Sequence[Node]) -> Iterable[str]:
    """The values of the graph's inputs: zeros stand for a gradient that no loss asks for."""
    read = {name for node in nodes for name in node.inputs} | {*graph.outputs}
    for at, seed in enumerate(grad.output_gradients):
        if seed is not None or graph.inputs[at][0] not in read:
            yield seed or ""
        else:
            arguments = canonical({"self": {"tensor": 0}})
            yield grad.emit("aten.zeros_like.default", grad.outputs[at], arguments=arguments)
    yield from grad.inputs[grad.attrs["count"] + grad.attrs["inputs"] :]


def _first(pair: tuple[str, object]) -> str:
    return pair[0]


def _needed(graph: Graph, outputs: Iterable[str]) -> list[Node]:
    """The nodes that these outputs follow from, in order."""
    asked, found = {*outputs}, []
    for node in reversed(graph.nodes):
        if not asked.isdisjoint(node.outputs):
            asked.update(node.inputs)
            found.append(node)
    return found[::-1]


@lru_cache(256)
def _backward(text: str) -> Graph:
    from plantune.graph.graph import Graph

    return Graph.from_json(json.loads(text))
