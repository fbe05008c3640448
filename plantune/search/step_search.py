"""Measures what could be part of the fastest cover, until that cover is known altogether."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from plantune.graph.fusions import all_fusions
from plantune.graph.graph import Graph
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.measure.outcome import Measured, Outcome
from plantune.search.budget import Budget
from plantune.search.cover import Cover, best_covers
from plantune.search.options import FRAMEWORK, Costs, Try, options, tries
from plantune.search.progress import Progress, Report
from plantune.space.search_space import SearchSpace

# Guesses are scaled by this, round by round: first what looks best, then what would have to be
# better than it looks.
HOPES = (1.0, 0.75, 0.5)
TRIES_PER_COVER = 4


class Measurer(Protocol):
    """Checks and times one candidate, without risk for this process."""

    def measure(self, step: Step, candidate: Candidate) -> Outcome:
        """What became of it; raises only what ends the search."""


class TrialStore(Protocol):
    """Where outcomes are kept between searches."""

    def known(self, step: Step) -> dict[Candidate, Outcome]:
        """What was found for equal steps in this environment."""

    def keep(self, step: Step, candidate: Candidate, outcome: Outcome) -> None:
        """Keeps an outcome at once: a kill loses nothing but the trial in flight."""


class StepSearch:
    """The measuring part of a search."""

    def __init__(
        self, graph: Graph, space: SearchSpace, measurer: Measurer, store: TrialStore
    ) -> None:
        self.graph = graph
        self.all_tries = tries(graph, space, all_fusions())
        self.costs = Costs()
        self._measurer = measurer
        self._store = store
        self._recall()

    def _recall(self) -> None:
        """Outcomes of earlier searches count as measured."""
        known: dict[str, dict[Candidate, Outcome]] = {}
        for tried in self.all_tries:
            signature = tried.step.signature
            if signature not in known:
                known[signature] = self._store.known(tried.step)
            if tried.candidate in known[signature] and not self.costs.knows(tried):
                self.costs.learn(tried, known[signature][tried.candidate])

    def run(self, budget: Budget, report: Report) -> None:
        """Measures until nothing unknown could be part of the best cover, or the time is up."""
        for hope in HOPES:
            self.costs.hope = hope
            while budget.left_for("measuring") > 0:
                missing = self._missing()
                if not missing:
                    break
                for tried in missing[:TRIES_PER_COVER]:
                    if budget.left_for("measuring") <= 0:
                        return
                    report(self.progress(budget, tried))
                    self.measure(tried)

    def measure(self, tried: Try) -> Outcome:
        outcome = self._measurer.measure(tried.step, tried.candidate)
        self._store.keep(tried.step, tried.candidate, outcome)
        self.costs.learn(tried, outcome)
        return outcome

    def _missing(self) -> list[Try]:
        """Unmeasured parts of the best cover, the most expensive first."""
        found = best_covers(self.graph, options(self.all_tries, self.costs, known_only=False), 1)
        cover = found[0][1] if found else ()
        unknown = {
            tried.key: tried
            for option in cover
            if not self.costs.knows(tried := Try(option.step, option.candidate))
        }
        return sorted(unknown.values(), key=lambda tried: -self.costs.of(tried))

    def covers(self, wanted: int) -> list[tuple[float, Cover]]:
        """The best covers of what is known; framework ops that were not measured are guessed."""
        self.costs.hope = 1.0
        known = options(self.all_tries, self.costs, known_only=True)
        return best_covers(self.graph, known, wanted)

    def framework_us(self) -> float:
        """The framework op by op, in the layout that callers bring."""
        return sum(
            self.costs.of(tried)
            for tried in self.all_tries
            if tried.candidate.family == FRAMEWORK and tried.candidate.config["layout"] == "nchw"
        )

    def progress(self, budget: Budget, tried: Try | None, phase: str = "measuring") -> Progress:
        found = self.covers(1)
        outcomes: Sequence[Outcome] = tuple(self.costs.outcomes.values())
        measured = sum(isinstance(outcome, Measured) for outcome in outcomes)
        detail = f"{tried.step.name}: {tried.candidate.family}" if tried else ""
        return Progress(
            phase=phase,
            detail=detail,
            measured=measured,
            rejected=len(outcomes) - measured,
            best_us=found[0][0] if found else math.inf,
            framework_us=self.framework_us(),
            seconds_left=budget.left_s,
        )
