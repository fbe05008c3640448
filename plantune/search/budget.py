"""One budget in seconds for the whole search, on the monotonic clock."""

from __future__ import annotations

import time

# How much of it each phase may use, at the latest: steps, then whole programs, then the race.
SHARES = {"measuring": 0.5, "ranking": 0.6, "racing": 1.0}


class Budget:
    """Starts with its making."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start = time.monotonic()

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def left_s(self) -> float:
        return max(self.seconds - self.spent_s, 0.0)

    def left_for(self, phase: str) -> float:
        """Seconds until the phase must end."""
        return max(self.seconds * SHARES[phase] - self.spent_s, 0.0)
