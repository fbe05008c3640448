"""Plans for a chip that is not here: kernels are compiled for it and ranked by estimates.

Nothing is timed, so nothing here makes a `Measured`. An estimate costs nothing and a build seconds:
only parts of the cheapest cover are built, until all of it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property

from plantune.base.outcome import Rejected
from plantune.errors import BuildError, NoViableCandidate
from plantune.graph import Attrs, Graph, Step
from plantune.kernels.build import build
from plantune.kernels.conversions import conversion_cost
from plantune.kernels.family import Candidate
from plantune.measure.limits import REASON_LENGTH
from plantune.plans.checked_plan import check_plan
from plantune.plans.planner.candidates import Key, StepCandidate, step_candidates
from plantune.plans.planner.cover import Cover, best_covers
from plantune.plans.problem import Problem
from plantune.plans.written_words import PREDICTED
from plantune.search.contenders.of_covers import plan_of
from plantune.search.predicted import (
    Footprint,
    PredictedCosts,
    Prediction,
    footprint_of,
    row_of,
)
from plantune.space.search_space import load_search_space

UNCHECKED = "not checked"

Say = Callable[[str], None]
Check = Callable[[Step, Candidate], Rejected | None]


class Predictor:
    """Plans one graph. `check` returns what is wrong with a kernel's numbers, if it can be known;
    `say` is called with what goes on.
    """

    def __init__(
        self,
        graph: Graph,
        problem: Problem,
        budget_s: float,
        *,
        check: Check | None = None,
        numerics: str = UNCHECKED,
        say: Say = lambda text: None,
    ) -> None:
        self._graph, self._problem = graph, problem
        self._space = load_search_space(problem.arch)
        self._end = time.monotonic() + budget_s
        self._check = check
        self._numerics = numerics
        self._say = say
        self._costs = PredictedCosts()
        self._rejected: list[tuple[Step, Candidate, Rejected]] = []
        self._checked: set[Key] = set()

    @cached_property
    def _candidates(self) -> tuple[StepCandidate, ...]:
        return step_candidates(self._graph, self._space)

    def run(self) -> Prediction:
        """The cheapest cover by estimates whose kernels build and fit the chip."""
        while True:
            cost_us, cover = self._best_cover()
            missing = _distinct(c for c in cover if not self._costs.knows(c))
            if missing:
                self._build(missing)
            elif self._are_right(cover):
                return self._prediction(cost_us, cover)
            self._costs.closed = self._is_over

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._end

    def _best_cover(self) -> tuple[float, Cover]:
        arch, priced = self._space.arch, self._costs.priced(self._candidates)
        found = best_covers(self._graph, priced, 1, conversion_cost(arch))
        if not found:
            raise NoViableCandidate(f"no candidates cover {self._problem.network} on {arch.name}")
        return found[0]

    def _build(self, missing: Sequence[StepCandidate]) -> None:
        self._say(f"compiling {len(missing)} kernels for {self._space.arch.name}")
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            results = list(threads.map(self._built, missing))
        for candidate, result in zip(missing, results, strict=True):
            if isinstance(result, Rejected):
                self._reject(candidate, result)
            elif result is not None:
                self._costs.footprints[candidate.key] = result

    def _built(self, candidate: StepCandidate) -> Footprint | Rejected | None:
        """What a kernel takes, or why it cannot be used; None if the time is over."""
        if self._is_over:
            return None
        try:
            built = build(candidate.chosen, self._space.arch)
        except BuildError as error:
            return Rejected("build", error.what[:REASON_LENGTH])
        return footprint_of(candidate.chosen, built, self._space.arch)

    def _are_right(self, cover: Cover) -> bool:
        """Whether no check found a fault in any of these, as far as there was time to look."""
        if self._check is None:
            return True
        sound = True
        for candidate in self._unchecked(cover):
            if self._is_over:
                break
            self._say(f"checking {candidate.candidate.family} for {candidate.step.name}")
            self._checked.add(candidate.key)
            fault = self._check(candidate.step, candidate.candidate)
            if fault is not None:
                self._reject(candidate, fault)
                sound = False
        return sound

    def _unchecked(self, cover: Cover) -> list[StepCandidate]:
        """Kernels that were built and not checked."""
        return _distinct(
            c for c in cover if c.key in self._costs.footprints and c.key not in self._checked
        )

    def _checked_text(self, cover: Cover) -> str:
        """What the plan says of its kernels' numbers."""
        left = len(self._unchecked(cover)) if self._check is not None else 0
        return self._numerics if not left else f"{self._numerics}, but for {left} kernels"

    def _reject(self, candidate: StepCandidate, rejected: Rejected) -> None:
        self._costs.reject(candidate, rejected)
        self._rejected.append((candidate.step, candidate.candidate, rejected))

    def _prediction(self, cost_us: float, cover: Cover) -> Prediction:
        plan = replace(
            plan_of(cover, self._graph, self._space, network=self._problem.network),
            origin=PREDICTED,
            evidence=Attrs(
                predicted_ms=cost_us / 1e3,
                built=len(self._costs.footprints),
                rejected=len(self._rejected),
                numerics=self._checked_text(cover),
            ),
        )
        steps = check_plan(plan, self._graph, self._space).of_pass
        rows = (row_of(each, self._costs.footprints, self._space.arch) for each in steps)
        built = len(self._costs.footprints)
        return Prediction(plan, tuple(rows), built, tuple(self._rejected))


def _distinct(found: Iterable[StepCandidate]) -> list[StepCandidate]:
    return list({candidate.key: candidate for candidate in found}.values())
