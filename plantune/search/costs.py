"""What each candidate costs: as it was measured, else as its family estimates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping

from plantune.base.outcome import Measured, Outcome, is_noisy
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.plans.planner.candidates import VIEW, Cluster, Key, StepCandidate, heaviest_node
from plantune.search.results import StepsSum


class Costs:
    """Measured times, and estimates corrected by how far off similar ones turned out to be.

    A `discount` below 1 makes estimates look better than they are, so that more of them get
    measured.
    """

    def __init__(self) -> None:
        self.discount = 1.0
        self.outcomes: dict[Key, Outcome] = {}
        self._fastest_us: dict[str, float] = {}
        # Measured time over estimate: of one config in a cluster, of a family by its heaviest op,
        # and the least of the family.
        self._in_cluster: dict[tuple[Cluster, Candidate], float] = {}
        self._by_op: dict[tuple[str, str], list[float]] = {}
        self._least: dict[str, float] = {}

    def learn(self, candidate: StepCandidate, outcome: Outcome) -> None:
        self.outcomes[candidate.key] = outcome
        if isinstance(outcome, Measured):
            step, family = candidate.step, candidate.candidate.family
            fastest = min(self.fastest_us(step), outcome.median_us)
            self._fastest_us[step.signature] = fastest
            ratio = outcome.median_us / candidate.estimate_us
            self._in_cluster[candidate.cluster, candidate.candidate] = ratio
            self._by_op.setdefault((family, heaviest_node(step).op), []).append(ratio)
            self._least[family] = min(self._least.get(family, ratio), ratio)

    def knows(self, candidate: StepCandidate) -> bool:
        return candidate.key in self.outcomes

    def unsure(self, candidate: StepCandidate) -> int:
        """How many ops of it have an estimated time. A view takes none."""
        measured = isinstance(self.outcomes.get(candidate.key), Measured)
        return 0 if measured or candidate.candidate.family == VIEW else len(candidate.nodes)

    def fastest_us(self, step: Step) -> float:
        """The time of the fastest candidate measured for a step; infinite if there is none."""
        return self._fastest_us.get(step.signature, math.inf)

    def of(self, candidate: StepCandidate) -> float:
        """Microseconds; infinite for a rejected candidate."""
        outcome = self.outcomes.get(candidate.key)
        if isinstance(outcome, Measured):
            return outcome.median_us
        # Noise blames the machine, and what always runs is needed to cover the graph.
        if outcome is None or (candidate.always_runs and is_noisy(outcome)):
            return self.discount * candidate.estimate_us * self._correction(candidate)
        return math.inf

    def expected_us(self, candidate: StepCandidate) -> float:
        """As `of`, but an estimate is what is most likely, not what is worth a measurement."""
        us = self.of(candidate)
        if not math.isfinite(us) or isinstance(self.outcomes.get(candidate.key), Measured):
            return us
        return candidate.estimate_us * self._correction(candidate, self._usual(candidate))

    def summed(self, candidates: Iterable[StepCandidate]) -> StepsSum:
        """What these take together, as is known now."""
        found = list(candidates)
        measured = (isinstance(self.outcomes.get(c.key), Measured) for c in found)
        return StepsSum(sum(map(self.expected_us, found)), len(found), len(found) - sum(measured))

    def priced(
        self, candidates: Iterable[StepCandidate], *, measured_only: bool = False
    ) -> Iterator[tuple[StepCandidate, float]]:
        """The candidates that can be part of a cover, with their costs.

        With `measured_only` an estimate counts only for a candidate that always runs.
        """
        for candidate in candidates:
            cost_us = self.of(candidate)
            is_sure = self.knows(candidate) or candidate.always_runs
            if math.isfinite(cost_us) and (is_sure or not measured_only):
                yield candidate, cost_us

    def _correction(self, candidate: StepCandidate, otherwise: float | None = None) -> float:
        """How far off estimates were: of this config in its cluster, else of the family for the op,
        else of the family at its best, so that good candidates get measured.
        """
        known = self._in_cluster.get((candidate.cluster, candidate.candidate))
        if known is not None:
            return known
        family = candidate.candidate.family
        ratios = self._by_op.get((family, heaviest_node(candidate.step).op))
        if ratios:
            return statistics.median_low(ratios)
        return self._least.get(family, 1.0) if otherwise is None else otherwise

    def _usual(self, candidate: StepCandidate) -> float:
        """How far off the estimates of a family were, whatever the op."""
        family = candidate.candidate.family
        found = [statistics.median_low(r) for (f, _), r in self._by_op.items() if f == family]
        return statistics.median_low(found) if found else 1.0


def times_us(outcomes: Mapping[Key, Outcome]) -> dict[str, dict[Candidate, float]]:
    """The times of what was measured, by the step's signature and the candidate."""
    found: dict[str, dict[Candidate, float]] = {}
    for (signature, candidate), outcome in outcomes.items():
        if isinstance(outcome, Measured):
            found.setdefault(signature, {})[candidate] = outcome.median_us
    return found
