"""The best covers by what is known now, for those who measure, rank and watch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from plantune.graph import Graph
from plantune.kernels.conversions import conversion_cost
from plantune.plans.planner.candidates import StepCandidate
from plantune.plans.planner.cover import NARROW_BEAM, Cover, Priced, beam_for, best_covers
from plantune.search import policy
from plantune.search.costs import Costs
from plantune.search.knowledge import Knowledge
from plantune.search.results import StepsSum
from plantune.space.arch import Arch


class Covers:
    """Finds covers of a graph, and remembers the best one from when it was last looked for."""

    def __init__(self, graph: Graph, arch: Arch, knowledge: Knowledge) -> None:
        self._graph, self._knowledge, self._costs = graph, knowledge, knowledge.costs
        self._find = partial(best_covers, graph, conversion=conversion_cost(arch))
        self._cover: Cover = ()
        self._conversions_us = math.inf
        self._next_look = -math.inf
        self.look(beam_for(graph))

    def to_measure(self, is_due: Callable[[StepCandidate], bool]) -> Cover:
        """The best cover of what is known, and of what is tried next if it is due."""
        offered = filter(is_due, self._knowledge.clusters.offered())
        found = self._find(self._costs.priced(offered), 1, beam=NARROW_BEAM)
        self.look_now_and_then()
        return found[0][1] if found else ()

    def of_measured(
        self, wanted: int, beam: int | None = None, unsure_us: float = policy.UNSURE_US
    ) -> list[tuple[float, Cover]]:
        """The best covers of measured candidates. Of what always runs an estimate counts only where
        nothing was measured: it may be far too low, and such a cover is not ranked beside others.
        """
        self._costs.discount = 1.0
        priced = self._costs.priced(self._knowledge.clusters.known(), measured_only=True)
        find = partial(self._find, wanted=wanted, beam=beam or beam_for(self._graph))
        return surest(priced, self._costs, unsure_us, find)

    def look(self, beam: int = NARROW_BEAM) -> None:
        """Finds the best one again."""
        start, discount = time.monotonic(), self._costs.discount
        for cost_us, cover in self.of_measured(1, beam, unsure_us=0.0):
            self._cover = cover
            self._conversions_us = cost_us - sum(map(self._costs.of, cover))
        self._costs.discount = discount
        now = time.monotonic()
        self._next_look = now + (now - start) / policy.BEST_COVER_PART

    def look_now_and_then(self) -> None:
        """As `look`, in a part of the time."""
        if time.monotonic() >= self._next_look:
            self.look()

    def best(self) -> StepsSum:
        """The best one that is known as a sum of its steps and the conversions between them."""
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
