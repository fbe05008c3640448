"""Measures what could be part of the fastest cover, until nothing in it is estimated any more."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from plantune.base.outcome import Outcome, Rejected
from plantune.errors import OutOfTime
from plantune.graph import Graph
from plantune.plans.plan import Plan
from plantune.plans.planner.candidates import LONG_BUILD_S, Key, StepCandidate, step_candidates
from plantune.search import policy
from plantune.search.budget import Budget, Durations
from plantune.search.builds import Builds, built_as
from plantune.search.covers import Covers
from plantune.search.knowledge import Knowledge
from plantune.search.measuring import TrialStore
from plantune.search.results import Progress, Report, StepsSum
from plantune.search.studies import Studies
from plantune.search.worker_pool import Measurer, WorkerPool
from plantune.space.search_space import SearchSpace


class StepSearch:
    """The measuring part of a search, by one measurer or by a pool of them."""

    # Whether there was time for all that could be part of the best cover.
    complete = False
    # What the best plan took that was timed as a whole.
    whole_us = math.inf

    def __init__(
        self,
        graph: Graph,
        space: SearchSpace,
        measurer: Measurer | WorkerPool,
        store: TrialStore,
        *,
        builds: Builds | None = None,
        studies: Studies | None = None,
    ) -> None:
        self.knowledge = Knowledge(step_candidates(graph, space), store, studies)
        self.candidates, self.costs = self.knowledge.candidates, self.knowledge.costs
        self._arch = space.arch
        self._covers = Covers(graph, space.arch, self.knowledge)
        self.covers = self._covers.of_measured
        self._pool = measurer if isinstance(measurer, WorkerPool) else WorkerPool([measurer])
        self._shared = self._pool.shared
        self.builds = builds or Builds(lambda c: None, lambda c: None, threads=0)
        self._cover = self.knowledge.weighed(())
        self.durations = Durations()
        # What this search built and ran: the worker has it in its caches.
        self.ran: set[Key] = set()
        # Whether candidates that take long to build are left for later.
        self._quick_alone = any(candidate.build_s >= LONG_BUILD_S for candidate in self.candidates)

    def run(self, budget: Budget, report: Report) -> None:
        """Measures until nothing unknown could be part of the best cover, or the time is over."""
        with suppress(OutOfTime):  # which says nothing of the candidate in flight
            self._calibrate(budget, report)
            if self._quick_alone:
                self._quick_alone = not self._settle(policy.QUICK_DISCOUNTS, budget, report)
            self.complete = not self._quick_alone and self._settle(policy.DISCOUNTS, budget, report)
        self._land_all(budget, report)
        self._covers.look()

    def _settle(self, discounts: Iterable[float], budget: Budget, report: Report) -> bool:
        """Measures until the best cover holds no estimate; False if there is no time for that."""
        for discount in discounts:
            self.costs.discount = discount
            if not self._measure_until_known(self._missing, budget, report):
                return False
        return True

    def _is_due(self, candidate: StepCandidate) -> bool:
        quick = not self._quick_alone or candidate.build_s < LONG_BUILD_S
        return quick or self.costs.knows(candidate)

    def _measure_until_known(
        self,
        find: Callable[[], list[StepCandidate]],
        budget: Budget,
        report: Report,
        least: int = policy.LEAST_PER_COVER,
    ) -> bool:
        """Measures until nothing unknown is found; False if there is no time for that. Before it
        looks again, at least so many are measured.
        """
        while missing := self._with_news_of_others(find):
            fitting = self._fitting(missing, budget)
            elsewhere = not self._pool.is_idle or any(map(self._is_taken, missing))
            if not fitting and not elsewhere:
                return False
            if not fitting and not self._pool.is_busy:
                # All that the best cover lacks is being measured: what will probably be next?
                fitting = self._fitting(self._want(missing), budget)
            batch = self._built(fitting, budget, least) if fitting else ()
            self._measure_all(batch, budget, report)
            if not batch and elsewhere:
                if not budget.left_for("measuring") and self._pool.is_idle:
                    return False
                self._land(budget, report, policy.POLL_S)
        return True

    def _with_news_of_others(self, find: Callable[[], list[StepCandidate]]) -> list[StepCandidate]:
        self.observe_others()
        return find()

    def _fitting(self, candidates: Iterable[StepCandidate], budget: Budget) -> list[StepCandidate]:
        """Those that are not being measured yet and are expected to fit into the time left."""
        found = [c for c in candidates if not self._is_taken(c) and self._fits(c, budget)]
        return found if self._shared is None else self._shared.spread(found)

    def _is_taken(self, candidate: StepCandidate) -> bool:
        if self._pool.has(candidate):
            return True
        return self._shared is not None and self._shared.has(candidate)

    def observe_others(self) -> None:
        """Takes into account what other searches found, and keeps it."""
        for key, outcome in () if self._shared is None else self._shared.new_outcomes():
            self.knowledge.learn_of_others(key, outcome)

    def _fits(self, candidate: StepCandidate, budget: Budget) -> bool:
        """Whether there seems to be time for it."""
        built = self.builds.threads > 0  # ahead
        needed_s = self.durations.seconds_of(candidate.candidate, built=built)
        return needed_s <= budget.left_for("measuring")

    def begin_with(
        self,
        plan: Plan,
        budget: Budget,
        report: Report,
        is_enough: Callable[[], bool] | None = None,
    ) -> None:
        """Measures the steps of a plan that is known to be good, the most expensive first, perhaps
        until it is enough.
        """
        wanted = {(choice.nodes, choice.candidate) for choice in plan.choices}
        found = (c for c in self.candidates if (c.nodes, c.candidate) in wanted)
        self._cover = self.knowledge.weighed(found)
        of_plan = [candidate for candidate, _ in self._cover]

        def unknown() -> list[StepCandidate]:
            self._covers.look_now_and_then()
            return [] if is_enough and is_enough() else self.knowledge.unknown(of_plan)

        with suppress(OutOfTime):
            least = 1 if is_enough else policy.LEAST_PER_COVER
            self._measure_until_known(unknown, budget, report, least)
        self._land_all(budget, report)

    def _calibrate(self, budget: Budget, report: Report) -> None:
        """While the first kernels are built, times each of the framework's ops at its largest."""
        if not self.builds.threads:
            return
        self._want(self._with_news_of_others(self._missing))
        self._measure_all(self.knowledge.largest_of_framework(), budget, report)

    def _measure_all(
        self, candidates: Iterable[StepCandidate], budget: Budget, report: Report
    ) -> None:
        for candidate in self._claimed(candidates, budget):
            while self._pool.is_full:
                self._land(budget, report)
            if self._fits(candidate, budget):
                self._begin(candidate)
                report(self.progress(budget, candidate))
            else:
                self._share(candidate, None)
            while self._pool.is_full:
                self._land(budget, report)

    def _claimed(
        self, candidates: Iterable[StepCandidate], budget: Budget
    ) -> Iterable[StepCandidate]:
        """The candidates that no other search has, where others share."""
        if self._shared is None:
            return candidates
        fitting = [c for c in candidates if self._fits(c, budget)]
        return self._shared.claim(*fitting) if fitting else ()

    def measure_all(
        self, candidates: Iterable[StepCandidate], budget: Budget, report: Report
    ) -> None:
        """Measures these, whatever is known of them."""
        with suppress(OutOfTime):
            self._measure_all(candidates, budget, report)
        self._land_all(budget, report)

    def _begin(self, candidate: StepCandidate) -> None:
        """Has a candidate measured; one that is known not to build is not."""
        failure = self.builds.failure(candidate)
        if failure is None:
            self._pool.start(candidate, policy.SLOWER * self.costs.fastest_us(candidate.step))
        else:
            self._learn(candidate, Rejected("build", failure))

    def _land(self, budget: Budget, report: Report, timeout_s: float | None = None) -> None:
        """Learns the outcome of the next candidate that was measured."""
        done = self._pool.finished(timeout_s)
        if done is None:
            return
        if done.outcome is None:
            self._share(done.candidate, None)
            return
        self.durations.learn(done.candidate.candidate, done.seconds)
        self.ran.add(done.candidate.key)
        self._learn(done.candidate, done.outcome)
        if (doing := self._pool.doing()) and not self._pool.is_idle:
            report(self.progress(budget, None, detail=", ".join(doing)))

    def _land_all(self, budget: Budget, report: Report) -> None:
        """Waits for what is still measured when the time is over, or nothing is missing."""
        while not self._pool.is_idle:
            with suppress(OutOfTime):
                self._land(budget, report)

    def _learn(self, candidate: StepCandidate, outcome: Outcome) -> None:
        is_known = self.knowledge.learn(candidate, outcome)
        self._share(candidate, outcome if is_known else None)

    def _share(self, candidate: StepCandidate, outcome: Outcome | None) -> None:
        if self._shared is not None:
            self._shared.report(candidate, outcome)

    def _missing(self) -> list[StepCandidate]:
        """Unmeasured parts of the best cover, the most expensive first."""
        self._cover = self.knowledge.weighed(self._covers.to_measure(self._is_due))
        return self.knowledge.unknown(candidate for candidate, _ in self._cover)

    def _built(
        self, missing: Sequence[StepCandidate], budget: Budget, least: int = policy.LEAST_PER_COVER
    ) -> Sequence[StepCandidate]:
        """What to measure now: of the missing ones those that are built, else whatever is built."""
        searches = 1 if self._shared is None else self._shared.searches
        part = len(missing) // (policy.PART_OF_COVER * searches)  # less and less: all end at once
        enough = max(least, part, 2 * self._pool.slots)
        if ready := self._ready(missing):
            return ready[:enough]
        # Few of the others: what is missing is built meanwhile.
        if ready := self._ready(self._fitting(self._want(missing), budget)):
            return ready[: max(least, self._pool.slots)]
        if self._pool.is_idle:  # else an outcome may come first
            self.builds.wait(missing, min(policy.WAIT_S, budget.left_for("measuring")))
        return ()

    def _ready(self, candidates: Iterable[StepCandidate]) -> list[StepCandidate]:
        return [candidate for candidate in candidates if self.builds.is_ready(candidate)]

    def _want(self, missing: Sequence[StepCandidate]) -> Sequence[StepCandidate]:
        """What is built from now on: what is missing, then what probably will be."""
        ahead = filter(self._is_due, self.knowledge.clusters.ahead(self._cover, policy.DEPTH))
        wanted = self.knowledge.unknown((*missing, *ahead))
        # One short build serves many steps, and would wait for minutes of long ones.
        self.builds.want(sorted(wanted, key=lambda c: c.build_s >= LONG_BUILD_S))
        return wanted

    def best(self) -> StepsSum:
        """The best cover that is known as a sum of its steps and the conversions between them."""
        return self._covers.best()

    def built(self) -> frozenset[Hashable]:
        """What this search has built so far, as `built_as` names it."""
        ran = (built_as(self._arch, c) for c in self.candidates if c.key in self.ran)
        return self.builds.built.union(ran)

    @property
    def count(self) -> int:
        """How many different candidates there are."""
        return self.knowledge.count

    @property
    def measured(self) -> int:
        """How many of them have a time."""
        return self.knowledge.measured

    def counts(self) -> dict[str, Any]:
        """What became of the candidates, by the names that a result has for it."""
        return {
            "measured": self.measured,
            "rejected": len(self.costs.outcomes) - self.measured,
            "candidates": self.count,
            "exhausted": self.complete,
        }

    def framework(self) -> StepsSum:
        """The framework call by call, as eager runs it, in the layout that callers bring."""
        return self.knowledge.framework

    def progress(
        self,
        budget: Budget,
        candidate: StepCandidate | None,
        stage: str = "measuring",
        detail: str = "",
    ) -> Progress:
        if candidate is not None:
            named = f"{candidate.step.name}: {candidate.candidate.family}"
            detail = ", ".join(self._pool.doing()) or named
        counts = self.counts()
        counts.pop("exhausted")
        return Progress(
            stage=stage,
            detail=detail,
            **counts,
            best=self.best(),
            framework=self.framework(),
            seconds_left=budget.left_s,
            whole_us=self.whole_us,
        )
