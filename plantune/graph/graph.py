"""The layer graph: a frozen DAG of ops, with its rules and its JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from plantune.base.canonical import Attrs, canonical, digest
from plantune.base.jsonable import fields_from_json, fields_to_json
from plantune.errors import InvalidGraph
from plantune.graph.free_casts import is_free, is_free_at_end
from plantune.graph.ops import op_named
from plantune.graph.ops.cast import INSERTED
from plantune.graph.ops.overload_backward import DRAWS
from plantune.graph.structure import Structure, structure_of
from plantune.graph.types import DTYPES, TensorType, dtype_name

T = TypeVar("T")


def output_names(node: str, count: int) -> tuple[str, ...]:
    """The values of a node: its own name, then name:1, name:2, ..."""
    return (node, *(f"{node}:{i}" for i in range(1, count)))


@dataclass(frozen=True)
class Node:
    """One op applied to named values. `types` are those of its outputs."""

    name: str
    op: str
    inputs: tuple[str, ...]
    types: tuple[TensorType, ...]
    attrs: Attrs = field(default_factory=Attrs)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        return output_names(self.name, len(self.types))

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, or belongs to a node that does."""
        return DRAWS in self.attrs

    @property
    def identity(self) -> dict[str, Any]:
        """The attributes that digests hold: old plans and trials know nothing of the others."""
        return {key: value for key, value in self.attrs.items() if key != INSERTED}

    def evaluate(
        self, inputs: Sequence[Tensor], floats: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        """The outputs by the op's meaning; a cast makes `floats`, if given, not its own dtype.

        What draws random numbers is computed in its own dtype: in `floats` torch draws others.
        """
        attrs = self.attrs
        if floats is not None and self.draws:
            own = _cast(inputs, DTYPES[attrs[DRAWS]])
            return tuple(_cast(op_named(self.op).evaluate(own, attrs), floats))
        if floats is not None and "dtype" in attrs:
            attrs = Attrs(attrs, dtype=dtype_name(floats))
        return tuple(op_named(self.op).evaluate(inputs, attrs))

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "op": self.op,
            "inputs": list(self.inputs),
            "types": [type_.to_json() for type_ in self.types],
            "attrs": dict(self.attrs),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Node:
        types = tuple(TensorType.from_json(item) for item in data["types"])
        return Node(data["name"], data["op"], tuple(data["inputs"]), types, Attrs(data["attrs"]))


def _cast(tensors: Sequence[Tensor], floats: torch.dtype) -> list[Tensor]:
    return [tensor.to(floats) if tensor.is_floating_point() else tensor for tensor in tensors]


Named = tuple[tuple[str, TensorType], ...]


def multiply_float32(nodes: Iterable[Node], types: Mapping[str, TensorType]) -> bool:
    """Whether any of them may sum products of float32: torch's settings decide how exactly."""
    return any(
        op_named(node.op).multiplies
        and any(types[value].dtype == "float32" for value in node.inputs)
        for node in nodes
    )


Pairs = tuple[tuple[str, str], ...]


def read_exactly(
    kind: type[T], data: Mapping[str, Any], what: str, check: Callable[[T], None] | None = None
) -> T:
    """A graph or a step of its JSON; raises InvalidGraph if the data is not that of one."""
    try:
        found: T = fields_from_json(kind, data)
        if check is not None:
            check(found)
        exact = canonical(fields_to_json(found)) == canonical(data)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InvalidGraph(f"this is not a {what}: {error!r}") from error
    if not exact:
        raise InvalidGraph(f"this is not a {what}: it holds more, or other types of values")
    return found


@dataclass(frozen=True)
class Graph:
    """A network at one shape, or a network with its backward pass.

    `inputs` come with each call, `parameters` and `buffers` live in the module under these names.
    `updates` are (buffer, value) pairs: after the forward pass the buffer takes that value.
    Nodes from `backward_from` on are the backward pass; its inputs are `output_gradients`, its
    results `gradients`, pairs of (input or parameter, value).
    """

    inputs: Named
    parameters: Named
    buffers: Named
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    updates: Pairs = ()
    backward_from: int | None = None
    output_gradients: Named = ()
    gradients: Pairs = ()

    def __post_init__(self) -> None:
        _check_nodes(self)
        _check_results(self)
        _check_phases(self)

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """The type of every value."""
        known = dict(self.sources)
        for node in self.nodes:
            known.update(zip(node.outputs, node.types, strict=True))
        return known

    @property
    def sources(self) -> Iterator[tuple[str, TensorType]]:
        """Every value that no node makes."""
        yield from self.inputs
        yield from self.parameters
        yield from self.buffers
        yield from self.output_gradients

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Where each node stands."""
        return {node.name: place for place, node in enumerate(self.nodes)}

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that makes each value."""
        return {value: node for node in self.nodes for value in node.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that read each value, in order."""
        readers: dict[str, list[Node]] = {name: [] for name in self.types}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                readers[value].append(node)
        return {name: tuple(nodes) for name, nodes in readers.items()}

    def makers(self, node: Node) -> tuple[Node, ...]:
        """The nodes that come before it in any order: those that make what it reads, and the one
        that draws random numbers before it, as these are drawn in the module's own order.
        """
        return self._makers[node.name]

    @cached_property
    def _makers(self) -> Mapping[str, tuple[Node, ...]]:
        found, drawn = {}, None
        for node in self.nodes:
            makers = [self.producers[value] for value in node.inputs if value in self.producers]
            if node.draws:
                makers += [drawn] if drawn else []
                drawn = node
            found[node.name] = tuple(makers)
        return found

    @cached_property
    def results(self) -> frozenset[str]:
        """Values that leave the graph: outputs, updates and gradients."""
        return frozenset(
            (*self.outputs, *(v for _, v in self.updates), *(v for _, v in self.gradients))
        )

    @cached_property
    def backward_nodes(self) -> frozenset[str]:
        start = len(self.nodes) if self.backward_from is None else self.backward_from
        return frozenset(node.name for node in self.nodes[start:])

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """The forward values and inputs that the backward pass reads, in order of their making."""
        backward = [node for node in self.nodes if node.name in self.backward_nodes]
        made = {value for node in backward for value in node.outputs}
        kept = {name for name, _ in (*self.parameters, *self.buffers, *self.output_gradients)}
        read = {value for node in backward for value in node.inputs} - made - kept
        return tuple(name for name in self.types if name in read)

    @cached_property
    def seeds_of(self) -> Mapping[str, frozenset[str]]:
        """Of each input or parameter with a gradient: the output gradients on which that depends,
        as autograd sees it.
        """
        own = {name: frozenset((name,)) for name, _ in self.output_gradients}
        for node in self.nodes:
            if node.name in self.backward_nodes:
                found = frozenset[str]().union(*(own.get(v, frozenset()) for v in node.inputs))
                own |= dict.fromkeys(node.outputs, found)
        return {target: own.get(value, frozenset()) for target, value in self.gradients}

    @cached_property
    def constants(self) -> frozenset[str]:
        """Values that change only when a weight does: parameters, buffers and what follows from
        them alone. A buffer that the graph itself updates is none.
        """
        moving = {buffer for buffer, _ in self.updates}
        known = {name for name, _ in (*self.parameters, *self.buffers)} - moving
        for node in self.nodes:
            is_fixed = not node.draws and node.name not in self.backward_nodes
            if is_fixed and known.issuperset(node.inputs):
                known.update(node.outputs)
        return frozenset(known)

    @cached_property
    def fixed(self) -> frozenset[str]:
        """Values that follow from no tensor at all, such as masks of a shape: they never change."""
        known: set[str] = set()
        for node in self.nodes:
            read = node.inputs if op_named(node.op).reads(node.attrs) else ()
            if self.constants.issuperset(node.outputs) and known.issuperset(read):
                known.update(node.outputs)
        return frozenset(known)

    @cached_property
    def weights_of_backward(self) -> tuple[str, ...]:
        """Parameters and buffers that the backward pass reads, or what follows from them alone."""
        read = {v for n in self.nodes if n.name in self.backward_nodes for v in n.inputs}
        for node in reversed(self.nodes):
            if self.constants.issuperset(node.outputs) and read.intersection(node.outputs):
                read.update(node.inputs)
        named = (*self.parameters, *self.buffers)
        return tuple(name for name, _ in named if name in read & self.constants)

    @cached_property
    def draws(self) -> bool:
        """Whether random numbers take part."""
        return any(node.draws for node in self.nodes)

    @cached_property
    def multiplies_float32(self) -> bool:
        return multiply_float32(self.nodes, self.types)

    @cached_property
    def structure(self) -> Structure:
        return structure_of(self)

    @property
    def digest(self) -> str:
        """The network's signature: the same under other names."""
        return self.structure.digest

    @cached_property
    def named_digest(self) -> str:
        """It changes with every field, names too. Plans of earlier releases are found by it."""
        return digest(self.identity)

    @property
    def identity(self) -> dict[str, Any]:
        """Its JSON without the attributes that digests ignore."""
        nodes = [{**node.to_json(), "attrs": node.identity} for node in self.nodes]
        return {**self.to_json(), "nodes": nodes}

    @cached_property
    def inserted_casts(self) -> tuple[str, ...]:
        """The names of casts that are not in the user's code."""
        return tuple(node.name for node in self.nodes if INSERTED in node.attrs)

    @cached_property
    def casts(self) -> frozenset[str]:
        """The names of casts that a step may take with it (see `plantune.graph.free_casts`), but of
        weights: those are cast where they are prepared.
        """
        return frozenset(
            node.name
            for node in self.nodes
            if node.op == "cast"
            and is_free_at_end(node, self.types[node.inputs[0]])
            and node.name not in self.constants
        )

    def passes(self, node: Node) -> bool:
        """Whether a step may take a node's source for its result."""
        return node.name in self.casts and is_free(node, self.types[node.inputs[0]])

    def to_json(self) -> dict[str, Any]:
        return fields_to_json(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Graph:
        """The graph of `to_json`; raises InvalidGraph if the data is not one."""
        return read_exactly(Graph, data, "layer graph")


def _check_nodes(graph: Graph) -> None:
    """Each name once, each input made before it is read, each type what its op makes."""
    known: dict[str, TensorType] = {}
    for name, type_ in graph.sources:
        _check_name(name)
        if name in known:
            raise InvalidGraph(f"value {name!r} is there twice")
        known[name] = type_
    for node in graph.nodes:
        _check_name(node.name)
        op = op_named(node.op)
        missing = [value for value in node.inputs if value not in known]
        if missing:
            raise InvalidGraph(f"node {node.name!r} reads {missing}, which nothing before it makes")
        if op.arity is not None and len(node.inputs) != op.arity:
            raise InvalidGraph(
                f"node {node.name!r}: {node.op} takes {op.arity} inputs, got {len(node.inputs)}"
            )
        types = tuple(op.infer([known[value] for value in node.inputs], node.attrs))
        if types != node.types:
            raise InvalidGraph(f"node {node.name!r} makes {types}, but says {node.types}")
        for value, type_ in zip(node.outputs, types, strict=True):
            if value in known:
                raise InvalidGraph(f"value {value!r} is there twice")
            known[value] = type_


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidGraph(f"a name is a string that is not empty, got {name!r}")


def _check_results(graph: Graph) -> None:
    """What leaves the graph exists and has the type of what it stands for."""
    types = graph.types
    for value in graph.results:
        if value not in types:
            raise InvalidGraph(f"result {value!r} is made by no node")
    _check_pairs(graph, graph.updates, {name for name, _ in graph.buffers}, "a buffer")
    asked = {name for name, _ in (*graph.inputs, *graph.parameters)}
    _check_pairs(graph, graph.gradients, asked, "an input or a parameter")


def _check_pairs(graph: Graph, pairs: Pairs, targets: Collection[str], kind: str) -> None:
    seen: set[str] = set()
    for target, value in pairs:
        if target not in targets or target in seen:
            raise InvalidGraph(
                f"{value!r} stands for {target!r}, which is not {kind}, or is there twice"
            )
        seen.add(target)
        wanted, got = graph.types[target], graph.types[value]
        # Who takes a gradient brings it into the dtype of what it is of.
        casts = pairs is graph.gradients and wanted.is_float and got.is_float
        if wanted.shape != got.shape or (wanted.dtype != got.dtype and not casts):
            raise InvalidGraph(f"{value!r} cannot stand for {target!r}: {got}, {wanted}")


def _check_phases(graph: Graph) -> None:
    """The forward pass neither reads nor returns what only a backward pass has."""
    start = graph.backward_from
    if start is None:
        if graph.gradients or graph.output_gradients:
            raise InvalidGraph("gradients need a backward pass: backward_from is None")
        return
    if type(start) is not int or not 0 <= start <= len(graph.nodes):
        raise InvalidGraph(f"backward_from {start!r} is outside of the nodes")
    late = {name for name, _ in graph.output_gradients}
    for node in graph.nodes[:start]:
        if not late.isdisjoint(node.inputs):
            raise InvalidGraph(f"node {node.name!r} of the forward pass reads an output's gradient")
    late.update(value for node in graph.nodes[start:] for value in node.outputs)
    for value in (*graph.outputs, *(value for _, value in graph.updates)):
        if value in late:
            raise InvalidGraph(f"{value!r} leaves the forward pass, but the backward pass makes it")
