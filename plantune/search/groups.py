"""Which configs of a family to try next: what the cost model likes, as long as it pays off."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from plantune.kernels.family import Candidate

# So many configs in a row without a better one, and the rest is left alone.
PATIENCE = 12
# What is wrong or takes a worker along counts for several: it costs seconds, and it is the kernel's
# fault more often than the config's.
GRAVE = 4
# A better one is better by more than what measuring alone differs.
BETTER = 0.99
# Where there are more configs than this, they are sampled after the first ones, at least so often
# as patience says.
MOST_IN_ORDER = 300
SEEDS = 16
BATCH = 8


class Proposer(Protocol):
    """Says which configs look good by those that were tried."""

    def propose(
        self,
        tried: Mapping[Candidate, float | None],
        left: Sequence[Candidate],
        wanted: int,
    ) -> list[Candidate]:
        """Some of those that are left; `tried` has a time for each, None for what failed."""


class Group:
    """The configs of one family for kindred steps: what is fast for one is so for the others.

    Times are relative to a guess for the step, so that those of several steps compare.
    """

    def __init__(self, candidates: Sequence[Candidate], proposer: Proposer | None = None) -> None:
        self._left = dict.fromkeys(candidates)
        self._large = len(candidates) > MOST_IN_ORDER
        self._proposer = proposer
        self._proposed: deque[Candidate] = deque()
        self._tried: dict[Candidate, float | None] = {}
        self._best = float("inf")
        self._idle = 0
        self._grave = False

    def learn(self, candidate: Candidate, relative: float | None, *, grave: bool = False) -> None:
        """The time of a candidate at one of the steps; None where it was rejected."""
        explored = candidate in self._left
        self._left.pop(candidate, None)
        known = self._tried.get(candidate)
        better = relative is not None and (known is None or relative < known)
        if better or candidate not in self._tried:
            self._tried[candidate] = relative
        if relative is not None and relative < BETTER * self._best:
            self._idle = 0
        elif explored:
            self._idle += GRAVE if grave else 1
            self._grave |= grave
        if relative is not None:
            self._best = min(self._best, relative)

    @property
    def finished(self) -> bool:
        """Whether trying more of them would hardly pay off."""
        sampled = not self._large or self._grave or len(self._tried) >= SEEDS + PATIENCE
        return not self._left or (self._idle >= PATIENCE and sampled)

    def leaders(self, wanted: int) -> list[Candidate]:
        """The best of those that were tried somewhere."""
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
        if self._large and self._proposer is not None and len(self._tried) >= SEEDS:
            self._proposed = deque(c for c in self._proposed if c in self._left)
            if len(self._proposed) < wanted:
                left = [c for c in self._left if c not in self._proposed]
                batch = max(wanted, BATCH)
                self._proposed += self._proposer.propose(self._tried, left, batch)
            yield from self._proposed
        yield from self._left
