"""How long it takes to measure a candidate, by what it took before: what does not fit in the time
that is left is not begun.
"""

from __future__ import annotations

from collections import defaultdict, deque

from plantune.kernels.family import Candidate
from plantune.kernels.registry import family_named

# Beside a build: references, checks with two seeds, timing.
PROOF_S = 0.5
# The next one may take as long as the longest of so many of its family.
REMEMBERED = 4
# What an earlier search built is found in a cache, by this part of its time.
CACHED = 0.2


class Pace:
    """Seconds by kernel family."""

    def __init__(self) -> None:
        self._seen: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def learn(self, candidate: Candidate, seconds: float) -> None:
        self._seen[candidate.family].append(seconds)

    def seconds_of(self, candidate: Candidate, *, built: bool = False) -> float:
        """What checking and timing this one will take, and building it unless it is `built`."""
        seen = self._seen.get(candidate.family)
        if seen:
            return max(seen)
        return PROOF_S + (0.0 if built else family_named(candidate.family).build_s)

    def build_s(self, candidate: Candidate, *, cached: bool) -> float:
        """What building this one again in a fresh place will take."""
        if not family_named(candidate.family).build_s:
            return 0.0
        return self.seconds_of(candidate) * (CACHED if cached else 1.0)
