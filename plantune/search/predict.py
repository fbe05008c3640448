"""Plans for a chip that is not here: kernels are compiled for it and ranked by guesses.

Nothing is timed, so nothing here makes a `Measured`. A guess costs nothing and a build seconds:
only what is part of the cheapest cover is built, until nothing in it is left to build.
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

from plantune.canonical import Attrs
from plantune.errors import BuildError, NoViableCandidate
from plantune.graph.fusions import all_fusions
from plantune.graph.step import Step
from plantune.kernels.build import build
from plantune.kernels.chips import measured_chip
from plantune.kernels.family import Candidate
from plantune.kernels.registry import family_named
from plantune.measure.limits import REASON_LENGTH
from plantune.measure.outcome import Rejected
from plantune.plan import Plan, candidates_by_step, check_plan
from plantune.problem import Problem
from plantune.search.cover import CONVERSIONS, Conversion, Cover, best_covers
from plantune.search.footprint import Footprint, footprint_of
from plantune.search.options import Costs, Try, options, tries
from plantune.search.ranking import plan_of
from plantune.space.arch import Arch
from plantune.space.search_space import load_search_space

# When so many configs of a family failed for a step and layout, the rest of them is left alone.
FAILURES_MAX = 3
UNCHECKED = "not checked"

Say = Callable[[str], None]
Check = Callable[[Step, Candidate], Rejected | None]
Key = tuple[str, Candidate]


@dataclass(frozen=True)
class PredictedStep:
    """A step of a predicted plan; `footprint` is None where nothing is compiled."""

    step: Step
    candidate: Candidate
    guess_us: float
    footprint: Footprint | None


@dataclass(frozen=True)
class Prediction:
    """A predicted plan, its steps in the order in which they run, and what was refused."""

    plan: Plan
    steps: tuple[PredictedStep, ...]
    built: int
    rejected: tuple[tuple[Step, Candidate, Rejected], ...]


class Guesses(Costs):
    """Costs where nothing is ever measured."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self._footprints: dict[Key, Footprint] = {}
        self._failures: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def of(self, tried: Try) -> float:
        """Microseconds; infinite for what cannot be used, or, once closed, was not built."""
        given_up = self._failures[_field(tried)] >= FAILURES_MAX and not self.knows(tried)
        late = self.closed and not self.knows(tried)
        refused = tried.key in self.outcomes
        return math.inf if refused or given_up or late else tried.guess_us

    def knows(self, tried: Try) -> bool:
        """Whether it was built; what compiles nothing counts as built."""
        return tried.key in self._footprints or not family_named(tried.candidate.family).build_s

    def footprint(self, tried: Try) -> Footprint | None:
        return self._footprints.get(tried.key)

    def accept(self, tried: Try, footprint: Footprint) -> None:
        self._footprints[tried.key] = footprint

    def reject(self, tried: Try, rejected: Rejected) -> None:
        self.outcomes[tried.key] = rejected
        self._failures[_field(tried)] += 1

    @property
    def built(self) -> int:
        return len(self._footprints)


def _field(tried: Try) -> tuple[str, tuple[str, ...]]:
    return tried.step.signature, tried.kin


class Predictor:
    """Plans one problem. `check` says what is wrong with a kernel's numbers, where that is known;
    `say` is told what goes on.
    """

    def __init__(
        self,
        problem: Problem,
        budget_s: float,
        *,
        check: Check | None = None,
        numerics: str = UNCHECKED,
        say: Say = lambda text: None,
    ) -> None:
        self._problem = problem
        self._space = load_search_space(problem.arch)
        self._end = time.monotonic() + budget_s
        self._check = check
        self._numerics = numerics
        self._say = say
        self._costs = Guesses()
        self._rejected: list[tuple[Step, Candidate, Rejected]] = []
        self._checked: set[Key] = set()

    @cached_property
    def _tries(self) -> dict[tuple[tuple[str, ...], Candidate], Try]:
        found = tries(self._problem.graph, self._space, all_fusions())
        return {(_nodes(tried.step), tried.candidate): tried for tried in found}

    def run(self) -> Prediction:
        """The cheapest cover by guesses whose kernels build and fit the chip."""
        while True:
            cost_us, cover = self._cover()
            used = [self._tries[_nodes(o.step), o.candidate] for o in cover]
            missing = _distinct(tried for tried in used if not self._costs.knows(tried))
            if missing:
                self._build(missing)
            elif self._are_right(used):
                return self._prediction(cost_us, cover, self._told(used))
            self._costs.closed = self._is_over

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._end

    def _cover(self) -> tuple[float, Cover]:
        choices = options(self._tries.values(), self._costs, known_only=False)
        arch = self._space.arch
        found = best_covers(self._problem.graph, choices, 1, conversion_on(arch))
        if not found:
            raise NoViableCandidate(f"no candidates cover {self._problem.network} on {arch.name}")
        return found[0]

    def _build(self, missing: Sequence[Try]) -> None:
        self._say(f"compiling {len(missing)} kernels for {self._space.arch.name}")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        with ThreadPoolExecutor(cores) as pool:
            results = list(pool.map(self._built, missing))
        for tried, result in zip(missing, results, strict=True):
            if isinstance(result, Rejected):
                self._reject(tried, result)
            elif result is not None:
                self._costs.accept(tried, result)

    def _built(self, tried: Try) -> Footprint | Rejected | None:
        """What a kernel takes, or why it cannot be used; None where the time is up."""
        if self._is_over:
            return None
        try:
            built = build(tried.step, tried.candidate, self._space.arch)
        except BuildError as error:
            return Rejected("build", error.what[:REASON_LENGTH])
        return footprint_of(tried.step, tried.candidate, built, self._space.arch)

    def _are_right(self, used: Sequence[Try]) -> bool:
        """Whether no check found fault with any of these, as far as there was time to look."""
        if self._check is None:
            return True
        sound = True
        for tried in self._unchecked(used):
            if self._is_over:
                break
            self._say(f"checking {tried.candidate.family} for {tried.step.name}")
            self._checked.add(tried.key)
            fault = self._check(tried.step, tried.candidate)
            if fault is not None:
                self._reject(tried, fault)
                sound = False
        return sound

    def _unchecked(self, used: Sequence[Try]) -> list[Try]:
        """Kernels that were built and never run."""
        built = _distinct(tried for tried in used if self._costs.footprint(tried) is not None)
        return [tried for tried in built if tried.key not in self._checked]

    def _told(self, used: Sequence[Try]) -> str:
        """What the plan says of its kernels' numbers."""
        left = len(self._unchecked(used)) if self._check is not None else 0
        return self._numerics if not left else f"{self._numerics}, but for {left} kernels"

    def _reject(self, tried: Try, rejected: Rejected) -> None:
        self._costs.reject(tried, rejected)
        self._rejected.append((tried.step, tried.candidate, rejected))

    def _prediction(self, cost_us: float, cover: Cover, numerics: str) -> Prediction:
        plan = replace(
            plan_of(cover, self._problem, self._space),
            origin="predicted",
            evidence=Attrs(
                predicted_ms=cost_us / 1e3,
                built=self._costs.built,
                rejected=len(self._rejected),
                numerics=numerics,
            ),
        )
        steps = check_plan(plan, self._problem.graph, self._space)
        chosen = candidates_by_step(plan, steps)
        rows = [self._row(step, chosen[step.name]) for step in steps if step.phase != "refresh"]
        return Prediction(plan, tuple(rows), self._costs.built, tuple(self._rejected))

    def _row(self, step: Step, candidate: Candidate) -> PredictedStep:
        tried = Try(step, candidate, self._space.arch)
        return PredictedStep(step, candidate, tried.guess_us, self._costs.footprint(tried))


def conversion_on(arch: Arch) -> Conversion:
    """What changing a layout costs on the chip of an arch."""
    usual = CONVERSIONS[arch.kind]
    if arch.chip is None:
        return usual
    share = arch.chip.memory_gb_per_s / measured_chip().memory_gb_per_s
    return replace(usual, bytes_per_us=usual.bytes_per_us * share)


def _nodes(step: Step) -> tuple[str, ...]:
    return tuple(node.name for node in step.nodes)


def _distinct(found: Iterable[Try]) -> list[Try]:
    return list({tried.key: tried for tried in found}.values())
