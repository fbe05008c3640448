"""The best cover that is known by now, for those who watch a search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from plantune.plans.planner.cover import NARROW_BEAM, Cover, Priced
from plantune.search import policy
from plantune.search.costs import Costs
from plantune.search.results import StepsSum


class BestCover:
    """What was the best cover when it was last looked for; `covers` finds so many of a beam."""

    def __init__(
        self, covers: Callable[[int, int], Sequence[tuple[float, Cover]]], costs: Costs
    ) -> None:
        self._covers, self._costs = covers, costs
        self._cover: Cover = ()
        self._conversions_us = math.inf
        self._next_look = -math.inf

    def look(self, beam: int = NARROW_BEAM) -> None:
        """Finds it again."""
        start, discount = time.monotonic(), self._costs.discount
        for cost_us, cover in self._covers(1, beam):
            self._cover = cover
            self._conversions_us = cost_us - sum(map(self._costs.of, cover))
        self._costs.discount = discount
        now = time.monotonic()
        self._next_look = now + (now - start) / policy.BEST_COVER_PART

    def look_now_and_then(self) -> None:
        """As `look`, in a part of the time."""
        if time.monotonic() >= self._next_look:
            self.look()

    def summed(self) -> StepsSum:
        """The sum of its steps and of the conversions between them."""
        steps = self._costs.summed(self._cover)
        return replace(steps, us=steps.us + self._conversions_us)


def surest(
    priced: Iterable[Priced],
    costs: Costs,
    unsure_us: float,
    find: Callable[[Iterable[Priced]], Sequence[tuple[float, Cover]]],
) -> list[tuple[float, Cover]]:
    """Of the covers that `find` finds those with the fewest estimates; each of these makes a cover
    dearer by `unsure_us`.
    """
    found = find((c, us + unsure_us * costs.unsure(c)) for c, us in priced)
    unsure = [sum(map(costs.unsure, cover)) for _, cover in found]
    return [
        (cost_us - unsure_us * of_cover, cover)
        for (cost_us, cover), of_cover in zip(found, unsure, strict=True)
        if of_cover == unsure[0]
    ]
