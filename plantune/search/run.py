"""A search that has started: what all of its stages share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plantune.graph.graph import Graph
from plantune.measure.machine_state import State
from plantune.measure.worker.client import Worker
from plantune.plans.problem import Problem
from plantune.search.budget import Budget
from plantune.search.results import Report, SearchOptions
from plantune.search.sought import Sought
from plantune.search.step_search import StepSearch
from plantune.space.search_space import SearchSpace


@dataclass(frozen=True)
class Run:
    """What all stages of a search share. `machine` is how it was while steps were measured."""

    sought: Sought
    options: SearchOptions
    worker: Worker
    budget: Budget
    steps: StepSearch
    report: Report
    # Workers on other GPUs of the same kind, and the routes that one of them compiled meanwhile.
    others: Sequence[Worker] = ()
    ahead: frozenset[str] = frozenset()
    machine: State | None = None

    @property
    def graph(self) -> Graph:
        return self.sought.graph

    @property
    def problem(self) -> Problem:
        return self.sought.problem

    @property
    def space(self) -> SearchSpace:
        return self.sought.space

    def enter(self, stage: str) -> None:
        """A stage begins."""
        self.budget.enter(stage)
        self.report(self.steps.progress(self.budget, None, stage))
