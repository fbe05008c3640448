"""What a running search tells: one frozen event a change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """`phase` is measuring, ranking or racing; times are of the whole network, in microseconds.

    `best_us` is the best cover so far and `framework_us` the framework op by op, as sums of steps;
    both are guesses as long as some of their steps are not measured.
    """

    phase: str
    detail: str
    measured: int
    rejected: int
    best_us: float
    framework_us: float
    seconds_left: float


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Tells nobody."""
