"""One budget in seconds for a whole search, and what stages and candidates take of it."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from plantune.kernels.family import Candidate
from plantune.kernels.registry import family_named
from plantune.measure.timing import Effort
from plantune.search import policy

# Until the first stage: plans that are known, all candidates, the start of the workers.
PREPARING = "preparing"


class Budget:
    """Starts when it is made, with some seconds `spent` already. `race_s` is roughly how long the
    calls of a race take.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        race_s: float = 0.0,
        spent_s: float = 0.0,
    ) -> None:
        self.seconds = seconds
        self.race_s = race_s
        self._clock = clock
        self._start = self._entered = clock() - spent_s
        self._stage = PREPARING
        self._spent: defaultdict[str, float] = defaultdict(float)

    def enter(self, stage: str) -> None:
        """What follows is a part of this stage, until another one is entered."""
        now = self._clock()
        self._spent[self._stage] += now - self._entered
        self._stage, self._entered = stage, now

    @property
    def stages_s(self) -> Mapping[str, float]:
        """The seconds of each stage so far, waiting for others too, in the order of their begin."""
        self.enter(self._stage)
        return dict(self._spent)

    @property
    def spent_s(self) -> float:
        return self._clock() - self._start

    @property
    def left_s(self) -> float:
        return max(self.seconds - self.spent_s, 0.0)

    def exclude(self, seconds: float) -> None:
        """Does not count these seconds, in which it waited for others."""
        self._start += seconds

    def left_for(self, stage: str) -> float:
        """Seconds until the stage must end."""
        return max(self._start + self._end_s(stage) - self._clock(), 0.0)

    def limited(self, effort: Effort, stage: str) -> Effort:
        """The effort, limited: nothing begins after the stage, and it is cut off soon after."""
        end, grace = self._start + self._end_s(stage), self._grace_s(stage)
        # A race goes on for some calls of every route; without them nothing is known.
        early = policy.LAST_ROUNDS * (self._end_s("racing") - self._end_s("ranking"))
        until = end - early if stage == "racing" else end
        return replace(effort, until=until, cut_at=end + grace)

    def cut_at(self, stage: str) -> float:
        """The time on the clock at which what still runs is cut off."""
        return self._start + self._end_s(stage) + self._grace_s(stage)

    def _grace_s(self, stage: str) -> float:
        later = {"measuring": "ranking", "ranking": "racing"}.get(stage)
        if later is None:
            return policy.LAST_GRACE * self.seconds
        return policy.GRACE[stage] * (self._end_s(later) - self._end_s(stage))

    def _end_s(self, stage: str) -> float:
        racing = max(min(policy.RACING[0] * self.seconds, policy.RACING[1]), policy.LEAST_RACING_S)
        racing = min(max(racing, self.race_s), policy.MOST_FOR_RACING * self.seconds)
        ranking = min(policy.RANKING[0] * self.seconds, policy.RANKING[1])
        ends = {"racing": 0.0, "ranking": racing, "measuring": racing + ranking}
        return self.seconds - ends[stage]


class Durations:
    """How long a candidate will take, by what others of its family took: what does not fit into the
    time that is left is not started.
    """

    def __init__(self) -> None:
        self._seen: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=policy.REMEMBERED)
        )

    def learn(self, candidate: Candidate, seconds: float) -> None:
        self._seen[candidate.family].append(seconds)

    def seconds_of(self, candidate: Candidate, *, built: bool = False) -> float:
        """What checking and timing a candidate takes, and building it unless it is `built`."""
        seen = self._seen.get(candidate.family)
        if seen:
            return max(seen)
        return policy.CHECKING_S + (0.0 if built else family_named(candidate.family).build_s)

    def build_s(self, candidate: Candidate, *, cached: bool) -> float:
        """What building a candidate again in another process takes."""
        if not family_named(candidate.family).build_s:
            return 0.0
        return self.seconds_of(candidate) * (policy.CACHED if cached else 1.0)
