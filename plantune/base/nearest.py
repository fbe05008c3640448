"""What somebody may have meant who mistyped a name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

LEAST = 0.6  # of what is alike, where two names are close
NEXT = 0.05  # less than that of the closest name is not named
MOST = 3


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the names that are close, the closest first; "" if there are none."""
    scores = {each: _likeness(name.lower(), each.lower()) for each in known}
    best = max(scores.values(), default=0.0)
    least = max(LEAST, best - NEXT)
    close = sorted((each for each in scores if scores[each] >= least), key=lambda n: -scores[n])
    return f"did you mean {' or '.join(close[:MOST])}?" if close else ""


def hint(name: str, known: Iterable[str]) -> str:
    """`did_you_mean` as the end of a message."""
    asked = did_you_mean(name, known)
    return f"; {asked}" if asked else ""


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
