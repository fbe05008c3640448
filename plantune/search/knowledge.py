"""What is known of a search's candidates: what earlier searches found, and each new outcome."""

from __future__ import annotations

from collections.abc import Iterable

from plantune.base.outcome import Measured, Outcome, is_noisy
from plantune.kernels.family import Candidate
from plantune.plans.planner.candidates import Key, StepCandidate, eagers_calls
from plantune.search.clusters import Clusters, Weighed
from plantune.search.costs import Costs
from plantune.search.measuring import TrialStore
from plantune.search.results import StepsSum
from plantune.search.studies import Studies


class Knowledge:
    """All candidates with their costs, by clusters; what is learnt is stored. Starts with what the
    store and the studies have of earlier searches.
    """

    def __init__(
        self, candidates: tuple[StepCandidate, ...], store: TrialStore, studies: Studies | None
    ) -> None:
        self.candidates = candidates
        self.costs = Costs()
        self.clusters = Clusters(candidates, self.costs, studies)
        self._framework = eagers_calls(candidates)
        self._by_key = {candidate.key: candidate for candidate in candidates}
        self._store = store
        self._disturbed: set[Key] = set()
        self._recall()

    @property
    def count(self) -> int:
        """How many different candidates there are."""
        return len(self._by_key)

    @property
    def measured(self) -> int:
        """How many of them have a time."""
        return sum(isinstance(outcome, Measured) for outcome in self.costs.outcomes.values())

    @property
    def framework(self) -> StepsSum:
        """The framework call by call, as eager runs it, in the layout that callers bring."""
        return self.costs.summed(self._framework)

    def largest_of_framework(self) -> list[StepCandidate]:
        """Of each op of the framework's the largest, as far as they are unknown."""
        by_size = sorted(self._framework, key=lambda candidate: candidate.estimate_us)
        largest = {candidate.step.nodes[0].op: candidate for candidate in by_size}
        return [c for c in largest.values() if not self.costs.knows(c)]

    def learn(self, candidate: StepCandidate, outcome: Outcome) -> bool:
        """Keeps an outcome. False if something disturbed it for the first time: then the candidate
        stays unknown, and is measured once more.
        """
        self._store.keep(candidate.step, candidate.candidate, outcome)
        if is_noisy(outcome) and candidate.key not in self._disturbed:
            self._disturbed.add(candidate.key)
            return False
        self.costs.learn(candidate, outcome)
        self.clusters.record(candidate, outcome)
        return True

    def learn_of_others(self, key: Key, outcome: Outcome) -> None:
        """Keeps what another search found, unless it is known here."""
        candidate = self._by_key.get(key)
        if candidate is not None and not self.costs.knows(candidate):
            self._store.keep(candidate.step, candidate.candidate, outcome)
            self._take(candidate, outcome)

    def unknown(self, candidates: Iterable[StepCandidate]) -> list[StepCandidate]:
        """Those without an outcome, one of several for equal steps."""
        return list({c.key: c for c in candidates if not self.costs.knows(c)}.values())

    def weighed(self, cover: Iterable[StepCandidate]) -> list[Weighed]:
        """One of those for equal steps, with what they take together, the most expensive first."""
        found: dict[Key, Weighed] = {}
        for candidate in cover:
            _, before_us = found.get(candidate.key, (candidate, 0.0))
            found[candidate.key] = candidate, before_us + self.costs.of(candidate)
        return sorted(found.values(), key=lambda weighed: -weighed[1])

    def _recall(self) -> None:
        recorded = self.clusters.recorded()
        stored: dict[str, dict[Candidate, Outcome]] = {}
        for candidate in self.candidates:
            signature, config = candidate.key
            if signature not in stored:
                stored[signature] = self._store.known(candidate.step)
            outcome = stored[signature].get(config) or recorded.get(candidate.key)
            if outcome is not None and not self.costs.knows(candidate):
                self._take(candidate, outcome)

    def _take(self, candidate: StepCandidate, outcome: Outcome) -> None:
        self.costs.learn(candidate, outcome)
        self.clusters.learn(candidate, outcome)
