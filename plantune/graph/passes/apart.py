"""ReLUs whose results are kept with a scalar added, and not without it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plantune.base.canonical import Attrs
from plantune.graph.free_casts import widens
from plantune.graph.graph import Graph, Node
from plantune.graph.ops.cast import INSERTED
from plantune.graph.ops.pointwise import numbers_apart
from plantune.graph.types import TensorType


def with_sums_apart(graph: Graph) -> Graph:
    """The graph of both passes in which a ReLU's gradient reads the ReLU's result plus a scalar,
    where the backward pass reads that anyway: the result alone is then not kept.

    Rounded as usual it would say zero of all that is small beside the scalar, which moved gradients
    of se_resnet9's weights by 1 %. So the sum is made by `add_apart`. Of 16 bits, as on a GPU;
    under autocast the sum is a float32, of which a cast to 16 bits is kept.
    """
    chosen = [found for node in graph.nodes if (found := _sum_of(graph, node)) is not None]
    return _Apart(graph, chosen).graph() if chosen else graph


@dataclass(frozen=True)
class _Kept:
    """The sum of a ReLU's result and a number, and what is `kept` of it: itself, or its cast."""

    relu: Node
    added: Node
    kept: Node

    @property
    def number(self) -> str:
        return self.added.inputs[1]

    @property
    def is_cast(self) -> bool:
        return self.kept is not self.added


def _sum_of(graph: Graph, relu: Node) -> _Kept | None:
    """The sum that can stand for the result of a ReLU."""
    if relu.op != "relu" or relu.name in graph.results:
        return None
    gradients = _gradients(graph, relu)
    others = [node for node in graph.consumers[relu.name] if node not in gradients]
    if not gradients or len(others) != 1 or others[0].op != "add":
        return None
    (added,) = others
    x, number = added.inputs
    scalar = graph.types[number].numel == 1 and number in graph.constants
    kept = _kept_of(graph, added)
    return _Kept(relu, added, kept) if kept is not None and x == relu.name and scalar else None


def _kept_of(graph: Graph, added: Node) -> Node | None:
    """What the backward pass keeps of a sum in 16 bits, if nothing reads more digits of it."""
    if added.types[0].torch_dtype.itemsize == 2:
        return added if added.name in graph.saved else None
    readers = graph.consumers[added.name]
    if added.types[0].dtype != "float32" or added.name in graph.results or len(readers) != 1:
        return None
    (cast,) = readers
    rounds = cast.op == "cast" and INSERTED in cast.attrs and not widens(cast)
    return cast if rounds and cast.name in graph.saved else None


def _gradients(graph: Graph, relu: Node) -> list[Node]:
    """Those of the ReLU that read its result, and nothing but its sign."""
    return [
        node
        for node in graph.consumers[relu.name]
        if node.op == "relu_grad" and node.inputs[0] != relu.name
    ]


class _Apart:
    """Puts the other sums and gradients in the place of the chosen ones."""

    def __init__(self, graph: Graph, chosen: list[_Kept]) -> None:
        self._graph = graph
        self._sums = {found.added.name: found for found in chosen}
        self._gradients = {
            node.name: found for found in chosen for node in _gradients(graph, found.relu)
        }
        self._names = set(graph.types)
        self._numbers: dict[str, Node] = {}  # rounded as the sums are

    def graph(self) -> Graph:
        start, nodes = self._graph.backward_from, list[Node]()
        for node in self._graph.nodes:
            made = self._in_place_of(node)
            if start is not None and node.name not in self._graph.backward_nodes:
                start += len(made) - 1
            nodes += made
        return replace(self._graph, nodes=tuple(nodes), backward_from=start)

    def _in_place_of(self, node: Node) -> list[Node]:
        if node.name in self._sums:
            found = self._sums[node.name]
            attrs = numbers_apart(found.kept.types[0].torch_dtype)
            return [*self._rounded(found), replace(node, op="add_apart", attrs=attrs)]
        if node.name not in self._gradients:
            return [node]
        found = self._gradients[node.name]
        if not found.is_cast:
            read = (found.added.name, found.number)
            return [replace(node, op="apart_grad", inputs=(node.inputs[0], *read))]
        makers = (found.kept, self._numbers[found.added.name])
        wide = [self._cast(each.name, each.types[0], "float32", INSERTED) for each in makers]
        inputs = (node.inputs[0], *(cast.name for cast in wide))
        return [*wide, replace(node, op="apart_grad", inputs=inputs)]

    def _rounded(self, found: _Kept) -> list[Node]:
        """The number as the cast of the sum has it where nothing was added."""
        if not found.is_cast:
            return []
        type_ = self._graph.types[found.number]
        cast = self._cast(found.number, type_, found.kept.types[0].dtype)
        self._numbers[found.added.name] = cast
        return [cast]

    def _cast(self, value: str, type_: TensorType, dtype: str, *marks: str) -> Node:
        name = f"{value}/{dtype}"
        while name in self._names:
            name += "_"
        self._names.add(name)
        attrs = Attrs(dict.fromkeys(marks, True), dtype=dtype)
        return Node(name, "cast", (value,), (TensorType(type_.shape, dtype),), attrs)
