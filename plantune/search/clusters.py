"""All candidates of a search by the nodes that they cover and their cluster, and which of them are
worth measuring next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from plantune.base.outcome import Measured, Outcome
from plantune.kernels.family import Candidate
from plantune.plans.planner.candidates import Cluster, Key, StepCandidate
from plantune.search import policy
from plantune.search.costs import Costs
from plantune.search.queue import Queue
from plantune.search.studies import Studies

# Rejections that are a kernel's fault: it is wrong, or crashes.
SERIOUS_STAGES = ("numerics", "crash", "timeout", "memory")
# Below this, a time counts as zero.
LEAST_US = 1e-3
# A candidate, and how much of a pass's time it takes at all of its places.
Weighed = tuple[StepCandidate, float]
# The nodes that a step covers, and the configs that are compared there.
StepCluster = tuple[tuple[str, ...], Cluster]


class Clusters:
    """Keeps the best known candidate of each place, and asks the queues what comes next."""

    def __init__(
        self, candidates: Iterable[StepCandidate], costs: Costs, studies: Studies | None
    ) -> None:
        self._costs = costs
        self._studies = studies
        self._places: dict[StepCluster, dict[Candidate, StepCandidate]] = {}
        self._faults: Counter[str] = Counter()
        self._best: dict[tuple[str, Cluster], tuple[float, Candidate]] = {}
        self._least_estimate: dict[tuple[str, Cluster], float] = {}
        estimates: dict[Cluster, dict[Candidate, float]] = {}
        for candidate in candidates:
            cluster, config, us = candidate.cluster, candidate.candidate, candidate.estimate_us
            self._places.setdefault((candidate.nodes, cluster), {})[config] = candidate
            of_cluster = estimates.setdefault(cluster, {})
            of_cluster[config] = min(of_cluster.get(config, us), us)
            at_step = (candidate.step.signature, cluster)
            self._least_estimate[at_step] = min(self._least_estimate.get(at_step, us), us)
        self._queues = {
            cluster: Queue(sorted(found, key=found.__getitem__), studies)
            for cluster, found in estimates.items()
        }

    def recorded(self) -> dict[Key, Outcome]:
        """The outcomes that the studies have of earlier searches."""
        found: dict[Key, Outcome] = {}
        if self._studies is not None:
            first = {cluster: next(iter(c.values())) for (_, cluster), c in self._places.items()}
            for cluster, candidate in first.items():
                found |= self._studies.recorded(candidate, self._queues[cluster].candidates)
        return found

    def learn(self, candidate: StepCandidate, outcome: Outcome) -> float | None:
        """Takes an outcome into account; its time relative to the estimate for the step."""
        queue, family = self._queues[candidate.cluster], candidate.candidate.family
        if not isinstance(outcome, Measured):
            serious = outcome.stage in SERIOUS_STAGES
            self._faults[family] += serious
            queue.learn(candidate.candidate, None, serious=serious)
            return None
        self._faults[family] -= policy.MOST_FAULTS
        at_step = (candidate.step.signature, candidate.cluster)
        relative = outcome.median_us / self._least_estimate[at_step]
        queue.learn(candidate.candidate, relative)
        if at_step not in self._best or outcome.median_us < self._best[at_step][0]:
            self._best[at_step] = (outcome.median_us, candidate.candidate)
        return relative

    def record(self, candidate: StepCandidate, outcome: Outcome) -> None:
        """Takes a new outcome into account, and adds it to the studies."""
        relative = self.learn(candidate, outcome)
        if self._studies is not None:
            configs = self._queues[candidate.cluster].candidates
            self._studies.record(candidate, configs, outcome, relative)

    def offered(self) -> Iterator[StepCandidate]:
        """For each place the best known candidate and the next one to try."""
        for (_, cluster), candidates in self._places.items():
            yield from self._known(cluster, candidates)
            yield from self._next(cluster, candidates, 1)

    def known(self) -> Iterator[StepCandidate]:
        """For each place the best known candidate; what always runs also if it is not known."""
        for (_, cluster), candidates in self._places.items():
            found = self._known(cluster, candidates)
            yield from found or (c for c in candidates.values() if c.always_runs)

    def ahead(self, used: Sequence[Weighed], depth: int) -> Iterator[StepCandidate]:
        """What will probably be next when these make up the best cover: where one takes a hundred
        times as long as another, several of its configs come first.
        """
        found: list[tuple[float, StepCandidate]] = []
        for candidate, us in used:
            candidates = self._places[candidate.nodes, candidate.cluster]
            row = self._next(candidate.cluster, candidates, depth)
            found += [(place / max(us, LEAST_US), each) for place, each in enumerate(row, 1)]
        yield from (each for _, each in sorted(found, key=lambda pair: pair[0]))
        yield from (c for c in self.offered() if not self._costs.knows(c))

    def _known(
        self, cluster: Cluster, candidates: Mapping[Candidate, StepCandidate]
    ) -> list[StepCandidate]:
        signature = next(iter(candidates.values())).step.signature
        best = self._best.get((signature, cluster))
        return [] if best is None else [candidates[best[1]]]

    def _next(
        self, cluster: Cluster, candidates: Mapping[Candidate, StepCandidate], wanted: int
    ) -> list[StepCandidate]:
        _, family, *_ = cluster
        if self._faults[family] >= policy.MOST_FAULTS:
            return []
        queue = self._queues[cluster]
        best = [candidates[c] for c in queue.best(policy.BEST_OF_CLUSTER) if c in candidates]
        unknown = [candidate for candidate in best if not self._costs.knows(candidate)]
        return [*unknown, *(candidates[c] for c in queue.upcoming(candidates, wanted))]
