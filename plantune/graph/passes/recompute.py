"""What the backward pass computes anew instead of reading what the forward pass kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from plantune.graph.free_casts import widens
from plantune.graph.graph import Graph, Node, output_names
from plantune.graph.ops import op_named
from plantune.graph.ops.cast import INSERTED
from plantune.graph.ops.functions import FUNCTIONS

# As quick as reading the result, and part of the kernels that read it.
ARITHMETIC = frozenset(("add", "add_channel", "affine", "cast", "div", "mul", "mul_channel", "sub"))
SUMS = frozenset(("mean", "sum", "sum_to"))
DERIVATIVES = frozenset(f"{name}_grad" for name in FUNCTIONS)


def recomputed(graph: Graph) -> Graph:
    """The graph whose backward pass has nodes of its own for kept values that cost nothing.

    Such a value follows from another that is kept anyway by arithmetic with constants, and all that
    read it in the backward pass are ops that share a kernel with it. So the forward pass writes
    less, and may compute the value within a larger kernel. An input is read only if the backward
    pass reads it anyway: its owner may overwrite it where eager has kept what followed from it.

    Likewise what torch widens to combine it with float32: the narrow value is kept, as by eager.

    Likewise the result of a batch norm of which the gradient of an activation is the only reader,
    as of a GELU: the norm's own gradient, for which that is, reads all that it follows from.
    """
    sources = {v: s for v in graph.saved if (s := _widened(graph, v)) is not None}
    others = (value for value in graph.saved if _costs_nothing(graph, value))
    chosen = frozenset((*sources, *others))
    found = _Again(graph, chosen, {*sources.values()}).graph() if chosen else graph
    return _with_norms_again(found)


def _costs_nothing(graph: Graph, value: str) -> bool:
    node = graph.producers.get(value)
    return node is not None and _follows(graph, node) and _is_read_by_arithmetic(graph, value)


def _is_read_by_arithmetic(graph: Graph, value: str) -> bool:
    """Whether all that read a value in the backward pass share a kernel with what makes it."""
    readers = [n for n in graph.consumers[value] if n.name in graph.backward_nodes]
    return all(reader.op in SUMS or op_named(reader.op).pointwise for reader in readers)


def _widened(graph: Graph, value: str) -> str | None:
    """The narrower value of which torch made this one, if that can be kept for it."""
    cast = graph.producers.get(value)
    if cast is None or INSERTED not in cast.attrs or not widens(cast):
        return None
    (source,) = cast.inputs
    made = source in graph.producers and graph.types[source].torch_dtype.itemsize == 2
    return source if made and _is_read_by_arithmetic(graph, value) else None


def _follows(graph: Graph, node: Node) -> bool:
    """Whether it is computed from one value that is there in the backward pass."""
    read = [value for value in node.inputs if value not in graph.constants]
    if len(read) != 1 or node.op not in ARITHMETIC:
        return False
    (value,) = read
    maker = graph.producers.get(value)
    return value in graph.saved or (maker is not None and _follows(graph, maker))


def _with_norms_again(graph: Graph) -> Graph:
    """The graph whose backward pass makes results of batch norms anew where that costs nothing."""
    chosen = {v: n for v in graph.saved if (n := _gradient_of_norm(graph, v)) is not None}
    nodes: list[Node] = []
    for node in graph.nodes:
        for at, value in enumerate(node.inputs):
            if value in chosen and node.name in graph.backward_nodes:
                again = _norm_again(graph, value, chosen[value])
                nodes.append(again)
                inputs = (*node.inputs[:at], again.name, *node.inputs[at + 1 :])
                node = replace(node, inputs=inputs)  # noqa: PLW2901
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes)) if chosen else graph


def _gradient_of_norm(graph: Graph, value: str) -> Node | None:
    """The gradient of the batch norm that makes a value, if in the backward pass only a derivative
    reads the value, which this gradient alone reads. Of 16 bits, as on a GPU: on a CPU torch would
    need another pass for it.
    """
    norm, type_ = graph.producers.get(value), graph.types[value]
    if norm is None or norm.op != "batch_norm" or value != norm.name or value in graph.results:
        return None
    if type_.torch_dtype.itemsize != 2 or len(type_.shape) not in (2, 4):
        return None
    readers = graph.consumers[value]
    backward = [node for node in readers if node.name in graph.backward_nodes]
    if len(readers) != 2 or len(backward) != 1 or backward[0].op not in DERIVATIVES:
        return None
    (gradient,) = graph.consumers[backward[0].name] or (None,)
    if gradient is None or gradient.op != "batch_norm_grad" or backward[0].name in graph.results:
        return None
    x, weight, *_ = norm.inputs
    same = gradient.inputs == (backward[0].name, x, weight, *norm.outputs[1:3])
    return gradient if same else None


def _norm_again(graph: Graph, value: str, gradient: Node) -> Node:
    norm = graph.producers[value]
    _, x, weight, mean, invstd = gradient.inputs
    name = f"{norm.name}/again"
    while name in graph.types:
        name += "_"
    inputs = (x, weight, norm.inputs[2], mean, invstd)
    return Node(name, "batch_norm_again", inputs, norm.types[:1])


class _Again:
    """Puts each chosen value's node once more before the first backward node that reads it."""

    def __init__(self, graph: Graph, chosen: frozenset[str], sources: Collection[str]) -> None:
        self._graph, self._chosen = graph, chosen
        self._there = (set(graph.saved) | graph.constants | {*sources}) - chosen
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
