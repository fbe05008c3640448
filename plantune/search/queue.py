"""In which order the configs of a cluster are tried, and when the rest is left alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

from plantune.kernels.family import Candidate
from plantune.search import policy
from plantune.search.studies import Studies


class Queue:
    """The configs of one family at similar steps: what is fast at one is fast at the others.

    Times are relative to an estimate for the step, so that those of several steps compare.
    """

    def __init__(self, candidates: Sequence[Candidate], studies: Studies | None = None) -> None:
        self.candidates = candidates
        self._left = dict.fromkeys(candidates)
        self._is_large = len(candidates) > policy.MOST_IN_ORDER
        self._studies = studies
        self._proposed: deque[Candidate] = deque()
        self._tried: dict[Candidate, float | None] = {}
        self._best = float("inf")
        self._without_better = 0
        self._was_serious = False

    def learn(self, candidate: Candidate, relative: float | None, *, serious: bool = False) -> None:
        """The time of a candidate at one of the steps; None if it was rejected."""
        is_new = candidate in self._left
        self._left.pop(candidate, None)
        known = self._tried.get(candidate)
        if candidate not in self._tried or (
            relative is not None and (known is None or relative < known)
        ):
            self._tried[candidate] = relative
        if relative is not None and relative < policy.BETTER * self._best:
            self._without_better = 0
        elif is_new:
            self._without_better += policy.SERIOUS if serious else 1
            self._was_serious |= serious
        if relative is not None:
            self._best = min(self._best, relative)

    @property
    def finished(self) -> bool:
        """Whether more trials are unlikely to help."""
        enough = (
            not self._is_large
            or self._was_serious
            or len(self._tried) >= policy.TRIED_IN_ORDER + policy.PATIENCE
        )
        return not self._left or (self._without_better >= policy.PATIENCE and enough)

    def best(self, wanted: int) -> list[Candidate]:
        """The fastest of those that were tried at any step."""
        known = [(time, candidate) for candidate, time in self._tried.items() if time is not None]
        return [candidate for _, candidate in sorted(known, key=lambda pair: pair[0])[:wanted]]

    def upcoming(self, legal: Collection[Candidate], wanted: int) -> list[Candidate]:
        """What to try next at a step that has these legal candidates, the most promising first."""
        if self.finished:
            return []
        found: list[Candidate] = []
        for candidate in self._order(wanted):
            if candidate in legal and candidate not in found:
                found.append(candidate)
                if len(found) == wanted:
                    break
        return found

    def _order(self, wanted: int) -> Iterator[Candidate]:
        if (
            self._is_large
            and self._studies is not None
            and len(self._tried) >= policy.TRIED_IN_ORDER
        ):
            self._proposed = deque(c for c in self._proposed if c in self._left)
            if len(self._proposed) < wanted:
                left = [c for c in self._left if c not in self._proposed]
                batch = max(wanted, policy.SAMPLED_AT_ONCE)
                self._proposed += self._studies.propose(self._tried, left, batch)
            yield from self._proposed
        yield from self._left
