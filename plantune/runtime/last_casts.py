"""Leaves out casts at the end of a backward pass: gradients are gathered in one launch anyway."""

from __future__ import annotations

from dataclasses import replace

from plantune.graph.graph import Graph
from plantune.plan import Plan
from plantune.problem import Problem


def without_last_casts(graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """The graph and plan without the steps that only bring a parameter's gradient into its dtype:
    the gradients are what these read. Under autocast each parameter has one.
    """
    sources = _sources(graph, plan)
    if not sources:
        return graph, plan
    nodes = tuple(node for node in graph.nodes if node.name not in sources)
    gradients = tuple((name, sources.get(value, value)) for name, value in graph.gradients)
    fewer = replace(graph, nodes=nodes, gradients=gradients)
    problem = Problem.of(fewer, plan.problem.arch, plan.problem.network)
    choices = tuple(choice for choice in plan.choices if choice.nodes[0] not in sources)
    return fewer, replace(plan, problem=problem, choices=choices)


def _sources(graph: Graph, plan: Plan) -> dict[str, str]:
    """What each of these steps reads, by the name of its node and value."""
    inputs = {name for name, _ in graph.inputs}
    targets = [value for name, value in graph.gradients if name not in inputs]
    alone = {choice.nodes[0] for choice in plan.choices if len(choice.nodes) == 1}
    found: dict[str, str] = {}
    for node in graph.nodes[graph.backward_from :] if graph.backward_from is not None else ():
        (value, *others) = node.outputs
        is_last = value in targets and not others and not graph.consumers[value]
        handed = value in graph.outputs or any(value == new for _, new in graph.updates)
        if node.op == "cast" and node.name in alone and is_last and not handed:
            found[value] = node.inputs[0]
    # Another gradient that is the same value must stay one.
    return {name: source for name, source in found.items() if targets.count(name) == 1}
