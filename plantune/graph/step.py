"""A step: one launchable unit that covers one or more ops of the graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from plantune.base.canonical import digest
from plantune.base.jsonable import fields_to_json
from plantune.errors import InvalidGraph
from plantune.graph.free_casts import rounding_casts
from plantune.graph.graph import Graph, Named, Node, multiply_float32, read_exactly
from plantune.graph.ops import op_named
from plantune.graph.types import TensorType

PHASES = ("refresh", "forward", "backward")


@dataclass(frozen=True)
class Step:
    """Some nodes of a graph, in order, with the values that enter and leave.

    `constants` are the inputs that change only when a weight does. Steps of phase `refresh` run
    when a weight changed, `forward` and `backward` in every pass.
    """

    nodes: tuple[Node, ...]
    inputs: Named
    outputs: Named
    constants: frozenset[str]
    phase: str

    @property
    def name(self) -> str:
        """The first node's name: unique in a partition."""
        return self.nodes[0].name

    @cached_property
    def ops(self) -> tuple[str, ...]:
        return tuple(node.op for node in self.nodes)

    @cached_property
    def draws(self) -> bool:
        """Whether random numbers take part."""
        return any(node.draws for node in self.nodes)

    @cached_property
    def multiplies_float32(self) -> bool:
        return multiply_float32(self.nodes, self.types)

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """The type of every value that the step reads or makes."""
        known = dict(self.inputs)
        for node in self.nodes:
            known.update(zip(node.outputs, node.types, strict=True))
        # In memory a value has the type with which it leaves: see `contracted`.
        known.update((name, _inside(type_)) for name, type_ in self.outputs)
        return known

    @cached_property
    def internal(self) -> tuple[str, ...]:
        """Values made and read inside only."""
        leaving = {name for name, _ in self.outputs}
        made = [value for node in self.nodes for value in node.outputs]
        return tuple(value for value in made if value not in leaving)

    @cached_property
    def signature(self) -> str:
        """Equal for steps that do the same work, whatever their values are called."""
        alias = {name: f"i{i}" for i, (name, _) in enumerate(self.inputs)}
        nodes = []
        for i, node in enumerate(self.nodes):
            alias.update({value: f"n{i}:{j}" for j, value in enumerate(node.outputs)})
            reads = [alias[value] for value in node.inputs]
            nodes.append([node.op, reads, node.identity, [t.to_json() for t in node.types]])
        inputs = [[name in self.constants, type_.to_json()] for name, type_ in self.inputs]
        rounds = rounding_casts(self)
        what = [nodes, inputs, [alias[name] for name, _ in self.outputs], self.phase]
        return digest([*what, [alias[name] for name in rounds]] if rounds else what)

    def evaluate(
        self, values: Mapping[str, Tensor], floats: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """All values of the step from its inputs, by each op's meaning; the reference.

        With inputs in another precision than the step's, `floats` is what its casts make.
        """
        known = dict(values)
        for node in self.nodes:
            results = node.evaluate([known[v] for v in node.inputs], floats)
            known.update(zip(node.outputs, results, strict=True))
        return known

    @cached_property
    def flops(self) -> int:
        return sum(
            op_named(node.op).flops(
                [self.types[value] for value in node.inputs], node.types, node.attrs
            )
            for node in self.nodes
        )

    @cached_property
    def traffic_bytes(self) -> int:
        """The least the step moves: every input read once, every output written once."""
        return sum(type_.size_bytes for _, type_ in (*self.inputs, *self.outputs))

    def part(self, nodes: Sequence[Node], leaving: Iterable[str]) -> Step:
        """Some of its nodes as a step, which these values leave; what others make, it reads."""
        names = tuple(leaving)
        made = {value for node in nodes for value in node.outputs}
        reads = dict.fromkeys((*(value for node in nodes for value in node.inputs), *names))
        inputs = tuple((name, self.types[name]) for name in reads if name not in made)
        outputs = tuple((name, self.types[name]) for name in names)
        return Step(tuple(nodes), inputs, outputs, self.constants & dict(inputs).keys(), self.phase)

    def renamed(self, names: Mapping[str, str]) -> Step:
        """The same step reading its inputs under other names."""

        def swap(name: str) -> str:
            return names.get(name, name)

        nodes = tuple(
            Node(node.name, node.op, tuple(map(swap, node.inputs)), node.types, node.attrs)
            for node in self.nodes
        )
        inputs = tuple((swap(name), type_) for name, type_ in self.inputs)
        return Step(nodes, inputs, self.outputs, frozenset(map(swap, self.constants)), self.phase)

    def to_json(self) -> dict[str, Any]:
        """All of the step, so that another process can run it without its graph."""
        return fields_to_json(self, Step)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Step:
        """The step of `to_json`; raises InvalidGraph if the data is not one."""
        return read_exactly(Step, data, "step", _check_step)


def _check_step(step: Step) -> None:
    """Its nodes fit each other, it names what they read, and it makes what it promises."""
    graph = Graph(step.inputs, (), (), step.nodes, tuple(name for name, _ in step.outputs))
    made = {value for node in step.nodes for value in node.outputs}
    read = {value for node in step.nodes for value in node.inputs} - made
    given = {name for name, _ in step.inputs}
    if not step.nodes or not step.outputs or step.phase not in PHASES:
        raise InvalidGraph(f"a step has nodes, outputs and a phase of {', '.join(PHASES)}")
    if read != given or not step.constants <= given:
        raise InvalidGraph(f"the step's nodes read {sorted(read)}, its inputs are {sorted(given)}")
    for name, type_ in step.outputs:
        # The layout is that of the graph's edge, which a step does not see.
        if name not in made or _inside(type_) != _inside(graph.types[name]):
            raise InvalidGraph(f"the step does not make {name!r} as {type_}")


def make_step(graph: Graph, names: Collection[str]) -> Step:
    """The step that covers the named nodes; raises InvalidGraph if they are not of one phase."""
    wanted = set(names)
    unknown = wanted - graph.positions.keys()
    if not wanted or unknown:
        raise InvalidGraph(f"no step can cover {sorted(unknown) or 'nothing'}")
    nodes = tuple(graph.nodes[place] for place in sorted(graph.positions[name] for name in wanted))
    phases = {phase_of(graph, node) for node in nodes}
    if len(phases) != 1:
        raise InvalidGraph(f"nodes {sorted(wanted)} belong to several phases: {sorted(phases)}")
    made = {value for node in nodes for value in node.outputs}
    reads = dict.fromkeys(value for node in nodes for value in node.inputs if value not in made)
    leaving = [
        value
        for node in nodes
        for value in node.outputs
        if value in graph.results
        or any(reader.name not in wanted for reader in graph.consumers[value])
    ]
    return Step(
        nodes=nodes,
        inputs=tuple((name, _inside(graph.types[name])) for name in reads),
        outputs=tuple((name, graph.types[name]) for name in leaving),
        constants=graph.constants.intersection(reads),
        phase=phases.pop(),
    )


def _inside(type_: TensorType) -> TensorType:
    """The layout at the graph's edge is not part of the step's work."""
    return TensorType(type_.shape, type_.dtype)


def phase_of(graph: Graph, node: Node) -> str:
    """When a node runs: see `Step`."""
    if node.name in graph.backward_nodes:
        return "backward"
    return "refresh" if graph.constants.issuperset(node.outputs) else "forward"
