"""Counts in one launch what a pass counts: each batch norm has a counter of its batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plantune.graph.graph import Graph, Node
from plantune.plan import Plan
from plantune.problem import Problem


@dataclass(frozen=True)
class Counters:
    """Buffers by what a forward pass adds to them."""

    steps: Mapping[int, tuple[str, ...]]

    def count(self, values: Mapping[str, Tensor]) -> None:
        """Enqueues it."""
        for step, buffers in self.steps.items():
            torch._foreach_add_([values[name] for name in buffers], step)


def without_counters(graph: Graph, plan: Plan) -> tuple[Graph, Plan, Counters]:
    """The graph and plan without the steps that only add a number to a whole one in a buffer, and
    what counts instead of them.
    """
    alone = {choice.nodes[0] for choice in plan.choices if len(choice.nodes) == 1}
    found = {
        node.name: node.inputs[0]
        for node in graph.nodes
        if node.name in alone and _counts(graph, node)
    }
    steps: dict[int, tuple[str, ...]] = {}
    for node in graph.nodes:
        if node.name in found:
            step = int(node.attrs["beta"])
            steps[step] = (*steps.get(step, ()), found[node.name])
    if not found:
        return graph, plan, Counters(steps)
    return *_without(graph, plan, found), Counters(steps)


def _without(graph: Graph, plan: Plan, found: Mapping[str, str]) -> tuple[Graph, Plan]:
    nodes = tuple(node for node in graph.nodes if node.name not in found)
    start = graph.backward_from
    fewer = replace(
        graph,
        nodes=nodes,
        updates=tuple(pair for pair in graph.updates if pair[1] not in found),
        backward_from=None if start is None else start - len(found),
    )
    problem = Problem.of(fewer, plan.problem.arch, plan.problem.network)
    choices = tuple(choice for choice in plan.choices if choice.nodes[0] not in found)
    return fewer, replace(plan, problem=problem, choices=choices)


def _counts(graph: Graph, node: Node) -> bool:
    """Whether a node of the forward pass makes what a buffer holds after it, and nothing else."""
    if node.op != "affine" or node.attrs["alpha"] != 1 or node.types[0].is_float:
        return False
    updates = (node.inputs[0], node.name) in graph.updates
    read = graph.consumers[node.name] or node.name in graph.outputs
    return updates and not read and node.name not in graph.backward_nodes
