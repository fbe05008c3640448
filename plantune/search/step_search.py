"""Measures what could be part of the fastest cover, until that cover is known altogether."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from plantune.errors import OutOfTime
from plantune.graph.fusions import all_fusions
from plantune.graph.graph import Graph
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.measure.outcome import Measured, Outcome, Rejected
from plantune.plan import Plan
from plantune.search.budget import Budget
from plantune.search.builds import Builds
from plantune.search.cover import BEAM, CONVERSIONS, NARROW_BEAM, Cover, best_covers
from plantune.search.fields import Fields
from plantune.search.groups import Proposer
from plantune.search.options import FRAMEWORK, Costs, Try, options, tries
from plantune.search.pace import Pace
from plantune.search.progress import Progress, Report
from plantune.space.search_space import SearchSpace

# Guesses are scaled by this, round by round: first what looks best, then what would have to be
# better than it looks.
HOPES = (1.0, 0.75, 0.5)
# Of what is missing in a cover at least so many, and this part, are measured before the next.
TRIES_PER_COVER, PART_OF_COVER = 4, 4
# What is slower than the best of its step by more than this is in no plan, whatever conversions it
# spares.
SLOWER = 1.5
# How many configs of each step in the cover are built ahead, and how long to wait for one.
DEPTH = 6
WAIT_S = 0.5


class Measurer(Protocol):
    """Checks and times one candidate, without risk for this process."""

    def measure(self, step: Step, candidate: Candidate, limit_us: float) -> Outcome:
        """What became of it; raises only what ends the search. What takes longer than the limit
        need not be known well.
        """


class TrialStore(Protocol):
    """Where outcomes are kept between searches."""

    def known(self, step: Step) -> dict[Candidate, Outcome]:
        """What was found for equal steps in this environment."""

    def keep(self, step: Step, candidate: Candidate, outcome: Outcome) -> None:
        """Keeps an outcome at once: a kill loses nothing but the trial in flight."""


class StepSearch:
    """The measuring part of a search."""

    def __init__(
        self,
        graph: Graph,
        space: SearchSpace,
        measurer: Measurer,
        store: TrialStore,
        *,
        builds: Builds | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        self.graph = graph
        self._conversion = CONVERSIONS[space.arch.kind]
        self.all_tries = tries(graph, space, all_fusions())
        self.costs = Costs()
        self._fields = Fields(self.all_tries, self.costs, proposer)
        self._measurer = measurer
        self._store = store
        self._builds = builds
        self._used: list[Try] = []
        self.pace = Pace()
        # Whether there was time for all that could be part of the best cover.
        self.complete = False
        # What this search had built and run, so that it lies ready where it runs again.
        self.ran: set[tuple[str, Candidate]] = set()
        self._plain = [
            tried
            for tried in self.all_tries
            if tried.candidate.family == FRAMEWORK and tried.candidate.config["layout"] == "nchw"
        ]
        self._recall()
        self._best_us = self._known_us()

    def _recall(self) -> None:
        """Outcomes of earlier searches count as measured."""
        known: dict[str, dict[Candidate, Outcome]] = {}
        for tried in self.all_tries:
            signature = tried.step.signature
            if signature not in known:
                known[signature] = self._store.known(tried.step)
            if tried.candidate in known[signature] and not self.costs.knows(tried):
                self._learn(tried, known[signature][tried.candidate])

    def _learn(self, tried: Try, outcome: Outcome) -> None:
        self.costs.learn(tried, outcome)
        self._fields.learn(tried, outcome)

    def run(self, budget: Budget, report: Report) -> None:
        """Measures until nothing unknown could be part of the best cover, or the time is up."""
        with suppress(OutOfTime):  # which says nothing of the candidate in flight
            self._calibrate(budget, report)
            self.complete = all(self._is_known(hope, budget, report) for hope in HOPES)

    def _is_known(self, hope: float, budget: Budget, report: Report) -> bool:
        """Whether the best cover is known at last, with guesses scaled by `hope`."""
        self.costs.hope = hope
        while missing := self._missing():
            fitting = [tried for tried in missing if self._fits(tried, budget)]
            if not fitting:
                return False
            self._measure_all(self._built(fitting, budget), budget, report)
        return True

    def _fits(self, tried: Try, budget: Budget) -> bool:
        """Whether there seems to be time for it."""
        built_ahead = self._builds is not None and self._builds.threads > 0
        needed = self.pace.seconds_of(tried.candidate, built=built_ahead)
        return needed <= budget.left_for("measuring")

    def begin_with(self, plan: Plan, budget: Budget, report: Report) -> None:
        """Measures the steps of a plan that is known to be good."""
        wanted = {(choice.nodes, choice.candidate) for choice in plan.choices}
        tries = [t for t in self.all_tries if _spot(t.step, t.candidate) in wanted]
        unknown = {tried.key: tried for tried in tries if not self.costs.knows(tried)}
        if self._builds is not None:
            self._builds.want(unknown.values())
        with suppress(OutOfTime):
            self._measure_all([*unknown.values()], budget, report)

    def _calibrate(self, budget: Budget, report: Report) -> None:
        """While the first kernels are built, times each of the framework's ops at its largest."""
        if self._builds is None or not self._builds.threads:
            return
        self._want(self._missing())
        largest: dict[str, Try] = {}
        for tried in sorted(self._plain, key=lambda tried: tried.guess_us):
            largest[tried.step.nodes[0].op] = tried
        unknown = [tried for tried in largest.values() if not self.costs.knows(tried)]
        self._measure_all(unknown, budget, report)

    def _measure_all(self, tries: Sequence[Try], budget: Budget, report: Report) -> None:
        for tried in tries:
            if self._fits(tried, budget):
                report(self.progress(budget, tried))
                start = time.monotonic()
                self.measure(tried)
                self.pace.learn(tried.candidate, time.monotonic() - start)

    def measure(self, tried: Try) -> Outcome:
        """The outcome of a candidate; one that is known not to build needs no measuring."""
        failure = None if self._builds is None else self._builds.failure(tried)
        if failure is None:
            limit_us = SLOWER * self.costs.fastest_us(tried.step)
            outcome = self._measurer.measure(tried.step, tried.candidate, limit_us)
            self.ran.add(tried.key)
        else:
            outcome = Rejected("build", failure[:4000])
        self._store.keep(tried.step, tried.candidate, outcome)
        self._learn(tried, outcome)
        return outcome

    def _missing(self) -> list[Try]:
        """Unmeasured parts of the best cover, the most expensive first."""
        offered = {_spot(tried.step, tried.candidate): tried for tried in self._fields.offered()}
        found = self._best(offered.values(), 1, known_only=False, beam=NARROW_BEAM)
        cover = found[0][1] if found else ()
        used = [offered[_spot(option.step, option.candidate)] for option in cover]
        self._used = sorted(used, key=lambda tried: -self.costs.of(tried))
        self._best_us = self._known_us(NARROW_BEAM)
        return list({t.key: t for t in self._used if not self.costs.knows(t)}.values())

    def _built(self, missing: Sequence[Try], budget: Budget) -> Sequence[Try]:
        """What to measure now: of the missing those that are built, else whatever is built."""
        if self._builds is None:
            return missing[: _enough(missing)]
        for choice in (missing, self._want(missing)):
            ready = [tried for tried in choice if self._builds.is_ready(tried)]
            if ready:
                return ready[: _enough(missing)]
        self._builds.wait(missing, min(WAIT_S, budget.left_for("measuring")))
        return ()

    def _want(self, missing: Sequence[Try]) -> Collection[Try]:
        """What is built from now on: what is missing, then what will probably be."""
        assert self._builds is not None
        ahead = self._fields.ahead(self._used, DEPTH)
        wanted = {t.key: t for t in (*missing, *ahead) if not self.costs.knows(t)}
        self._builds.want(wanted.values())
        return wanted.values()

    def covers(self, wanted: int, beam: int = BEAM) -> list[tuple[float, Cover]]:
        """The best covers of what is known; framework ops that were not measured are guessed."""
        self.costs.hope = 1.0
        return self._best(self._fields.known(), wanted, known_only=True, beam=beam)

    def _best(
        self, found: Iterable[Try], wanted: int, *, known_only: bool, beam: int = BEAM
    ) -> list[tuple[float, Cover]]:
        choices = options(found, self.costs, known_only=known_only)
        return best_covers(self.graph, choices, wanted, self._conversion, beam)

    def _known_us(self, beam: int = BEAM) -> float:
        """The time of the best cover of what is known; infinite where nothing covers the graph."""
        hope = self.costs.hope
        found = self.covers(1, beam)
        self.costs.hope = hope
        return found[0][0] if found else math.inf

    @property
    def best_us(self) -> float:
        """The time of the best cover, as a sum of steps; infinite until one is known."""
        return self._best_us

    @property
    def candidates(self) -> int:
        """How many different ones there are for all steps."""
        return len({tried.key for tried in self.all_tries})

    def framework_us(self) -> float:
        """The framework op by op, in the layout that callers bring."""
        return sum(map(self.costs.of, self._plain))

    def progress(self, budget: Budget, tried: Try | None, phase: str = "measuring") -> Progress:
        outcomes: Sequence[Outcome] = tuple(self.costs.outcomes.values())
        measured = sum(isinstance(outcome, Measured) for outcome in outcomes)
        detail = f"{tried.step.name}: {tried.candidate.family}" if tried else ""
        return Progress(
            phase=phase,
            detail=detail,
            measured=measured,
            rejected=len(outcomes) - measured,
            best_us=self._best_us,
            framework_us=self.framework_us(),
            seconds_left=budget.left_s,
        )


def _enough(missing: Sequence[Try]) -> int:
    return max(TRIES_PER_COVER, len(missing) // PART_OF_COVER)


def _spot(step: Step, candidate: Candidate) -> tuple[tuple[str, ...], Candidate]:
    return tuple(node.name for node in step.nodes), candidate
