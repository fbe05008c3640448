"""Steps without their free casts, as kernels compute them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from plantune.graph.free_casts import is_free, is_free_at_end
from plantune.graph.graph import Node
from plantune.graph.step import Step


@dataclass(frozen=True)
class StoredNode(Node):
    """A node whose results are stored under these names, with the types in `step.types`."""

    stored: tuple[str, ...] = ()

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        return self.stored


def contracted(step: Step) -> Step:
    """The same step without its free casts, as kernels compute it.

    Readers of a cast read its source instead. If a cast's result leaves the step and its source
    does not, the node that makes the source takes the result's name. `step.types` has the type of
    each value that is in memory; a node's own types stay those of eager. Two kinds of casts remain:
    those that round, and those whose source is in memory, too.
    """
    return _Contraction(step).step() if _free_casts(step) else step


def stores_as_made(step: Step, cast: Node) -> bool:
    """Whether what a cast makes leaves a contracted step as it is: to round and then to store more
    digits is more than to store.
    """
    return step.types[cast.name].dtype == cast.types[0].dtype


def _free_casts(step: Step) -> dict[str, Node]:
    read = {value for node in step.nodes for value in node.inputs}
    found = {}
    for node in step.nodes:
        free = is_free if node.name in read else is_free_at_end
        if node.inputs and free(node, step.types[node.inputs[0]]):
            found[node.name] = node
    return found


class _Contraction:
    def __init__(self, step: Step) -> None:
        self._step = step
        self._casts = _free_casts(step)
        leaving = {name for name, _ in step.outputs}
        given = {name for name, _ in step.inputs}
        # The names under which sources leave.
        self._named: dict[str, str] = {}
        self._kept: set[str] = set()
        for name in self._casts:
            source = self._source(name)
            if name in leaving and {source} & (leaving | given | self._named.keys()):
                self._kept.add(name)
            elif name in leaving:
                self._named[source] = name

    def step(self) -> Step:
        nodes = (n for n in self._step.nodes if n.name not in self._casts or n.name in self._kept)
        return replace(self._step, nodes=tuple(map(self._node, nodes)))

    def _source(self, value: str) -> str:
        """What a value is without the casts."""
        while value in self._casts:
            (value,) = self._casts[value].inputs
        return value

    def _read(self, value: str) -> str:
        source = self._source(value)
        return self._named.get(source, source)

    def _node(self, node: Node) -> Node:
        inputs = tuple(map(self._read, node.inputs))
        outputs = tuple(self._named.get(value, value) for value in node.outputs)
        if outputs == node.outputs:
            return replace(node, inputs=inputs)
        fields = (outputs[0], node.op, inputs, node.types, node.attrs)
        return StoredNode(*fields, stored=outputs)
