"""What the budget of a search was enough for, in a line or two."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plantune.search.results import Result

# What a budget that was too short should be at least, and how many times longer.
ENOUGH_S, LONGER = 60.0, 5
# Starting is not part of the budget; it is mentioned if it takes this long.
LONG_START_S = 1.5


def longer_s(budget_s: float) -> float:
    """The budget to advise after one that was too short."""
    return max(ENOUGH_S, LONGER * budget_s)


def tried_text(result: Result, seconds: float) -> str:
    """How much was measured, and how to go on if there was no time for the rest."""
    took = f"{seconds:.0f} s"
    if (starting := seconds - result.spent_s) >= LONG_START_S:
        took += f", {starting:.0f} of them until Python, torch and the machine were ready"
    counts = f"{result.measured} measured, {result.rejected} rejected"
    text = f"{result.measured + result.rejected} of {result.candidates} candidates: {counts}"
    if result.exhausted or not result.complete:
        return f"{text}, {took}"
    longer = f"search again to go on, or --budget {longer_s(result.budget_s):g}"
    return f"{text}, {took}; for others there was no time: {longer}"


def unraced_text(result: Result) -> str:
    """What is kept if no plan got through a race in time."""
    text = f"{result.budget_s:g} s were too short to race a plan"
    if result.known is None:
        return f"{text}: the network runs as it is, which is never slower"
    return f"{text}: the plan that is used already stays"
