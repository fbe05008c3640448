"""Steps of a plan that a captured pass leaves out: what they do takes part in one other launch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from plantune.graph.graph import Graph, Node
from plantune.plans.checked_plan import CheckedPlan, check_plan
from plantune.plans.plan import Plan
from plantune.plans.problem import Problem


@dataclass(frozen=True)
class Counters:
    """Buffers by what a forward pass adds to them: each batch norm counts its batches."""

    steps: Mapping[int, tuple[str, ...]]

    def count(self, values: Mapping[str, Tensor]) -> None:
        """Enqueues it, in one launch."""
        for step, buffers in self.steps.items():
            torch._foreach_add_([values[name] for name in buffers], step)


# What a capture runs of a plan: its instances share it.
_captured: WeakKeyDictionary[CheckedPlan, tuple[CheckedPlan, Counters]] = WeakKeyDictionary()


def for_capture(checked: CheckedPlan) -> tuple[CheckedPlan, Counters]:
    """The plan without those steps, and what counts instead of some of them. Proved once for each
    plan: it is one for another graph.
    """
    found = _captured.get(checked)
    if found is None:
        fewer = without_last_casts(checked.graph, checked.plan)
        graph, plan, counters = without_counters(*fewer)
        if plan is checked.plan:  # which must not keep itself alive
            return checked, counters
        found = _captured[checked] = check_plan(plan, graph, checked.space), counters
    return found


def without_counters(graph: Graph, plan: Plan) -> tuple[Graph, Plan, Counters]:
    """The graph and plan without the steps that only add a number to a whole one in a buffer, and
    what counts instead of them.
    """
    alone, steps, found = _alone(plan), dict[int, tuple[str, ...]](), []
    for node in graph.nodes:
        if node.name in alone and _counts(graph, node):
            step = int(node.attrs["beta"])
            steps[step] = (*steps.get(step, ()), node.inputs[0])
            found.append(node.name)
    return *_without(graph, plan, found), Counters(steps)


def without_last_casts(graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """The graph and plan without the steps that only bring a parameter's gradient into its dtype:
    the gradients are what these read, and are gathered in one launch anyway. Under autocast each
    parameter has one.
    """
    sources = _sources(graph, plan)
    if not sources:
        return graph, plan
    gradients = tuple((name, sources.get(value, value)) for name, value in graph.gradients)
    return _without(replace(graph, gradients=gradients), plan, sources)


def _without(graph: Graph, plan: Plan, skipped: Collection[str]) -> tuple[Graph, Plan]:
    if not skipped:
        return graph, plan
    start = graph.backward_from
    before = [node for node in graph.nodes[:start] if node.name in skipped]
    fewer = replace(
        graph,
        nodes=tuple(node for node in graph.nodes if node.name not in skipped),
        updates=tuple(pair for pair in graph.updates if pair[1] not in skipped),
        backward_from=None if start is None else start - len(before),
    )
    problem = Problem.of(fewer, plan.problem.arch, plan.problem.network)
    choices = tuple(choice for choice in plan.choices if choice.nodes[0] not in skipped)
    return fewer, replace(plan, problem=problem, choices=choices)


def _alone(plan: Plan) -> set[str]:
    """The nodes that are a step each."""
    return {choice.nodes[0] for choice in plan.choices if len(choice.nodes) == 1}


def _counts(graph: Graph, node: Node) -> bool:
    """Whether a node of the forward pass makes what a buffer holds after it, and nothing else."""
    if node.op != "affine" or node.attrs["alpha"] != 1 or node.types[0].is_float:
        return False
    updates = (node.inputs[0], node.name) in graph.updates
    read = graph.consumers[node.name] or node.name in graph.outputs
    return updates and not read and node.name not in graph.backward_nodes


def _sources(graph: Graph, plan: Plan) -> dict[str, str]:
    """What each of these steps reads, by the name of its node and value."""
    inputs = {name for name, _ in graph.inputs}
    targets = [value for name, value in graph.gradients if name not in inputs]
    alone, found = _alone(plan), dict[str, str]()
    for node in graph.nodes[graph.backward_from :] if graph.backward_from is not None else ():
        (value, *others) = node.outputs
        is_last = value in targets and not others and not graph.consumers[value]
        handed = value in graph.outputs or any(value == new for _, new in graph.updates)
        if node.op == "cast" and node.name in alone and is_last and not handed:
            found[value] = node.inputs[0]
    # Another gradient that is the same value must stay one.
    return {name: source for name, source in found.items() if targets.count(name) == 1}
