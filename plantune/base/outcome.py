"""What became of a candidate: measured, or rejected with a reason. Never a number for a failure."""

from __future__ import annotations

from dataclasses import dataclass

STAGES = ("build", "memory", "crash", "timeout", "numerics", "roofline", "noisy")


@dataclass(frozen=True)
class Measured:
    """A candidate that is right, and how long one launch takes.

    `low_us` and `high_us` are the quartiles. `error` is the largest relative error that was seen
    against float64 and `bound` what was allowed; `cache` says in which state caches were.
    """

    median_us: float
    low_us: float
    high_us: float
    samples: int
    error: float
    bound: float
    deterministic: bool
    cache: str = "warm"


@dataclass(frozen=True)
class Rejected:
    """A candidate that cannot be used: at which stage, and why."""

    stage: str
    reason: str

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {self.stage!r}")


Outcome = Measured | Rejected


def is_noisy(outcome: Outcome) -> bool:
    """Whether it says something of the machine alone."""
    return isinstance(outcome, Rejected) and outcome.stage == "noisy"
