"""What a plan is searched for, and the plans for it that need no search."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from plantune.graph.graph import Graph
from plantune.graph.tracing.tape import Tape
from plantune.measure.subject import Raced
from plantune.plans.guess import framework_plans, guessed_plan, hand_plan
from plantune.plans.plan import Plan
from plantune.plans.problem import Problem
from plantune.space.search_space import SearchSpace, load_search_space


@dataclass(frozen=True)
class Sought:
    """What a plan is searched for: a graph, and for the race its network, by its name in the
    problem or by its tape.
    """

    graph: Graph
    problem: Problem
    tape: Tape | None = None

    @cached_property
    def space(self) -> SearchSpace:
        return load_search_space(self.problem.arch)

    @property
    def raced(self) -> Raced:
        """The network as it races."""
        return Raced(self.problem, self.tape)

    @cached_property
    def of_framework(self) -> tuple[Plan, ...]:
        """The framework's own kernels, as callers bring images and in channels_last."""
        return framework_plans(self.graph, self.space, network=self.problem.network)

    @cached_property
    def guess(self) -> Plan | None:
        """What calls use without a plan, if it is more than the framework's kernels."""
        return guessed_plan(self.graph, self.space, network=self.problem.network)

    def by_hand(self, without: Collection[str] = ()) -> Plan:
        """The plan that one would pick without these families."""
        return hand_plan(self.graph, self.space, network=self.problem.network, without=without)
