"""How one route to run a network compares with another: decided here, and put into words here."""

from __future__ import annotations

from dataclasses import dataclass

FASTER, SLOWER, TIE, UNDECIDED = "faster", "slower", "tie", "undecided"
# An interval whose ends are further apart than by this factor says too little.
WIDE = 1.25
# No float between two neighbours of 1 needs more decimals.
MOST_DECIMALS = 17


@dataclass(frozen=True)
class Interval:
    """A ratio of two medians, and its range with the stated confidence; 0 where no range is known,
    as of plans from before ranges were kept.
    """

    ratio: float
    low: float
    high: float
    confidence: float = 0.95

    @staticmethod
    def without_range(ratio: float) -> Interval:
        return Interval(ratio, ratio, ratio, 0.0)

    @property
    def is_wide(self) -> bool:
        """Whether it says too little of how two routes compare."""
        return self.high > WIDE * self.low

    @property
    def is_undecided(self) -> bool:
        """Whether either of the two may be the faster one, and by too much for a tie."""
        return self.verdict == UNDECIDED

    @property
    def verdict(self) -> str:
        """Who is faster beyond doubt; else a tie if both are about equal, or nothing is decided."""
        if self.high < 1:
            return FASTER
        if self.low > 1:
            return SLOWER
        return UNDECIDED if self.is_wide else TIE


def compared(found: Interval, other: str) -> str:
    """Whether something is faster than the other, and how many times; reads on after a name."""
    if found.verdict == FASTER:
        return f"{_times(1 / found.ratio)} times faster than {other}"
    if found.verdict == SLOWER:
        return f"{_times(found.ratio)} times slower than {other}"
    if found.verdict == TIE:
        return f"as fast as {other} within the noise"
    return f"neither clearly faster nor slower than {other}"


def part_text(found: Interval, whose: str) -> str:
    """The ratio as a part of somebody's time, and its range if that is known."""
    text = f"{number(found.ratio)} of {whose} time"
    if not found.confidence:
        return text
    ends = f"{number(found.low)} to {number(found.high)}"
    return f"{text}, {100 * found.confidence:.0f} % interval {ends}"


def number(value: float, decimals: int = 3) -> str:
    """With more decimals where these would round it to 1, and so deny that it is above or below."""
    text = f"{value:.{decimals}f}"
    while float(text) == 1 != value and decimals < MOST_DECIMALS:
        decimals += 1
        text = f"{value:.{decimals}f}"
    return text


def _times(factor: float) -> str:
    return number(factor, 2 if factor < 10 else 1 if factor < 100 else 0)
