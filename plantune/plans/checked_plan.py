"""A plan that fits its graph and arch: proved once, then taken by whatever runs or measures it."""

from __future__ import annotations

from dataclasses import dataclass

from plantune.errors import InvalidGraph, InvalidPlan
from plantune.graph.graph import Graph
from plantune.graph.partition import Partition, partition_into
from plantune.kernels.registry import legal_or_why_not
from plantune.kernels.resolved import ResolvedStep
from plantune.plans.plan import Plan
from plantune.space.search_space import SearchSpace


@dataclass(frozen=True, eq=False)
class CheckedPlan:
    """A plan, its graph, and its steps in running order, each with the family that runs it. Only
    `check_plan` makes one.
    """

    plan: Plan
    graph: Graph
    space: SearchSpace
    steps: tuple[ResolvedStep, ...]

    @property
    def partition(self) -> Partition:
        return tuple(chosen.step for chosen in self.steps)

    @property
    def of_pass(self) -> tuple[ResolvedStep, ...]:
        """The steps that run in each pass."""
        return tuple(chosen for chosen in self.steps if chosen.step.phase != "refresh")


def check_plan(plan: Plan, graph: Graph, space: SearchSpace) -> CheckedPlan:
    """The plan with its steps; raises InvalidPlan if it does not fit the graph or the arch."""
    if plan.problem.arch != space.arch.name:
        raise InvalidPlan(
            f"the plan is for {plan.problem.arch}, this is {space.arch.name}; search here"
        )
    if plan.problem.graph != graph.digest:
        raise InvalidPlan(
            f"the plan is for other layers ({plan.problem}) than these; search for these"
        )
    try:
        partition = partition_into(graph, [choice.nodes for choice in plan.choices])
    except InvalidGraph as error:
        raise InvalidPlan(f"the plan's steps do not cover its graph: {error}") from error
    by_node = {name: choice.candidate for choice in plan.choices for name in choice.nodes}
    steps = []
    for step in partition:
        candidate = by_node[step.name]
        found = legal_or_why_not(step, candidate, space)
        if isinstance(found, str):
            raise InvalidPlan(f"step {step.name!r}: {candidate.family}: {found}")
        steps.append(found)
    return CheckedPlan(plan, graph, space, tuple(steps))
