"""Recorded outcomes with their times, replayed: what each simulated worker meets."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

RECORDED = Path(__file__).with_name("recorded.json")
# A worker that died is replaced in this time; a straggler takes so many times as long.
RESTART_S, STRAGGLING = 3.0, 10.0


@dataclass(frozen=True)
class Job:
    """A candidate: how long measuring takes, the time that is found, and whether it kills the
    worker first.
    """

    seconds: float
    us: float
    crashes: bool

    @property
    def busy_s(self) -> float:
        return self.seconds + (RESTART_S if self.crashes else 0.0)


@dataclass(frozen=True)
class Recording:
    """What to replay. `slower` multiplies the recorded seconds, as a larger problem does."""

    count: int
    slower: float = 1.0
    crashes: float = 0.01
    stragglers: float = 0.01
    seed: int = 0

    def jobs(self) -> list[Job]:
        """Recorded outcomes, drawn again and again; some crash, some take very long."""
        outcomes = json.loads(RECORDED.read_text())["outcomes"]
        draw = random.Random(self.seed)
        made = []
        for _ in range(self.count):
            seconds, us = draw.choice(outcomes)
            straggles = draw.random() < self.stragglers
            crashes = draw.random() < self.crashes
            seconds *= self.slower * (STRAGGLING if straggles else 1.0)
            made.append(Job(seconds, us, crashes))
        return made
