"""Plans for a chip that is not here: kernels are compiled for it and ranked by estimates.

Nothing is timed, so nothing here makes a `Measured`. An estimate costs nothing and a build seconds:
only parts of the cheapest cover are built, until all of it is.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

from plantune.base.outcome import Rejected
from plantune.devices.cuda.build import Binary
from plantune.errors import BuildError, NoViableCandidate
from plantune.graph import Attrs, Graph, Step
from plantune.kernels.build import build
from plantune.kernels.conversions import conversion_cost
from plantune.kernels.cuda.cuda_family import CudaFamily, block_shared_bytes
from plantune.kernels.family import Candidate
from plantune.kernels.resolved import ResolvedStep
from plantune.measure.limits import REASON_LENGTH
from plantune.plans.checked_plan import check_plan
from plantune.plans.plan import Plan
from plantune.plans.planner.candidates import Key, StepCandidate, step_candidates
from plantune.plans.planner.cover import Cover, best_covers
from plantune.plans.problem import Problem
from plantune.plans.written_words import PREDICTED
from plantune.search import policy
from plantune.search.costs import Costs
from plantune.search.ranking import plan_of
from plantune.space import Arch
from plantune.space.search_space import load_search_space

UNCHECKED = "not checked"

Say = Callable[[str], None]
Check = Callable[[Step, Candidate], Rejected | None]


@dataclass(frozen=True)
class Footprint:
    """What a block of a kernel takes, as the assembler counted it; zeros if nothing counts it."""

    threads: int = 0
    registers: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True)
class PredictedStep:
    """A step of a predicted plan; `footprint` is None if nothing is compiled."""

    step: Step
    candidate: Candidate
    estimate_us: float
    footprint: Footprint | None


@dataclass(frozen=True)
class Prediction:
    """A predicted plan, its steps in running order, and what was rejected."""

    plan: Plan
    steps: tuple[PredictedStep, ...]
    built: int
    rejected: tuple[tuple[Step, Candidate, Rejected], ...]


class PredictedCosts(Costs):
    """Estimates alone, of what builds and fits the chip."""

    def __init__(self) -> None:
        super().__init__()
        # When closed, what was not built cannot be used.
        self.closed = False
        self.footprints: dict[Key, Footprint] = {}
        self._failures: Counter[tuple[object, ...]] = Counter()

    def of(self, candidate: StepCandidate) -> float:
        """Microseconds; infinite for what cannot be used."""
        given_up = self.closed or self._failures[_configs_of(candidate)] >= policy.FAILURES_MAX
        unknown = given_up and not self.knows(candidate)
        return math.inf if candidate.key in self.outcomes or unknown else candidate.estimate_us

    def knows(self, candidate: StepCandidate) -> bool:
        """Whether it was built; what compiles nothing counts as built."""
        return candidate.key in self.footprints or not candidate.build_s

    def reject(self, candidate: StepCandidate, rejected: Rejected) -> None:
        self.outcomes[candidate.key] = rejected
        self._failures[_configs_of(candidate)] += 1


def _configs_of(candidate: StepCandidate) -> tuple[object, ...]:
    return candidate.step.signature, candidate.cluster


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
        rows = map(self._row, check_plan(plan, self._graph, self._space).of_pass)
        built = len(self._costs.footprints)
        return Prediction(plan, tuple(rows), built, tuple(self._rejected))

    def _row(self, chosen: ResolvedStep) -> PredictedStep:
        key = (chosen.step.signature, chosen.candidate)
        footprint = self._costs.footprints.get(key)
        estimate_us = chosen.estimate_us(self._space.arch)
        return PredictedStep(chosen.step, chosen.candidate, estimate_us, footprint)


def footprint_of(chosen: ResolvedStep, built: object, arch: Arch) -> Footprint | Rejected:
    """What a block of a built kernel takes; rejected if a thread's registers do not suffice."""
    family = chosen.family
    if not isinstance(built, Binary) or not isinstance(family, CudaFamily):
        return Footprint()
    used = built.usage["run"]
    if used.spill_bytes:
        return Rejected("build", f"it spills {used.spill_bytes} bytes of a thread's registers")
    parts, config = chosen.parts, chosen.config
    shared = block_shared_bytes(used, arch) + family.shared_bytes(parts, config, arch)
    return Footprint(family.threads(parts, config), used.registers, shared)


def _distinct(found: Iterable[StepCandidate]) -> list[StepCandidate]:
    return list({candidate.key: candidate for candidate in found}.values())
