"""One budget in seconds for a whole search, on the monotonic clock, and what a phase has of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from plantune.measure.timing import Effort

# Of the budget, and seconds: how much is kept for ranking and for the race, whichever is less.
RANKING, RACING = (0.15, 10.0), (0.35, 15.0)
# A race starts some ten ways and calls each at least ten times.
CALLS_IN_A_RACE = 100
MOST_OF_IT = 0.6
# The part of a race's time that is left for its last rounds when nothing more is begun.
ROUNDS = 0.25
# Without a race nothing that was measured is used.
LEAST_RACING_S = 3.0
# What runs at the end of a phase may take this part of the next one, and of the budget after it.
GRACE, LAST_GRACE = {"measuring": 0.5, "ranking": 0.2}, 0.12


class Budget:
    """Starts with its making. `call_s` is how long one call of the network takes, roughly."""

    def __init__(
        self, seconds: float, clock: Callable[[], float] = time.monotonic, call_s: float = 0.0
    ) -> None:
        self.seconds = seconds
        self.call_s = call_s
        self._clock = clock
        self._start = clock()

    @property
    def spent_s(self) -> float:
        return self._clock() - self._start

    @property
    def left_s(self) -> float:
        return max(self.seconds - self.spent_s, 0.0)

    def left_for(self, phase: str) -> float:
        """Seconds until the phase must end."""
        return max(self._start + self._end_s(phase) - self._clock(), 0.0)

    def limited(self, effort: Effort, phase: str) -> Effort:
        """The effort, which begins nothing after the phase and is cut off soon after it."""
        end, grace = self._start + self._end_s(phase), self._grace_s(phase)
        # What a race has begun goes on for some calls of every way; without them nothing is known.
        early = ROUNDS * (self._end_s("racing") - self._end_s("ranking"))
        until = end - early if phase == "racing" else end
        return replace(effort, until=until, cut_at=end + grace)

    def cut_at(self, phase: str) -> float:
        """When what still runs is cut off, on the clock."""
        return self._start + self._end_s(phase) + self._grace_s(phase)

    def _grace_s(self, phase: str) -> float:
        later = {"measuring": "ranking", "ranking": "racing"}.get(phase)
        if later is None:
            return LAST_GRACE * self.seconds
        return GRACE[phase] * (self._end_s(later) - self._end_s(phase))

    def _end_s(self, phase: str) -> float:
        racing = max(min(RACING[0] * self.seconds, RACING[1]), LEAST_RACING_S)
        racing = min(max(racing, CALLS_IN_A_RACE * self.call_s), MOST_OF_IT * self.seconds)
        ranking = min(RANKING[0] * self.seconds, RANKING[1])
        ends = {"racing": 0.0, "ranking": racing, "measuring": racing + ranking}
        return self.seconds - ends[phase]
