"""A search ends with about the best plan on a machine that is slow at times, whatever its seed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from plantune.measure import timing
from plantune.measure.timing import Timing
from plantune.search import policy
from plantune.search.budget import Budget
from plantune.search.contenders import comparison, improvement, ranking
from plantune.search.contenders.contender import COVER, Contenders, labelled
from plantune.search.results import SearchOptions, silent
from plantune.search.run import Run

QUIET: Any = SimpleNamespace(word="slow")
# Of a call: where a plan's memory is, and what each sample adds.
MAKE, NOISE = 0.025, 0.04
STAGES, PHASE_S = (1.0, 1.3, 1.7), 4.0
BUDGET_S, MEASURED_S, BUILD_S = 60.0, 37.0, 0.15


@dataclass(frozen=True)
class Timed:
    """A plan that takes so much of the best one's time, with what swaps change of it."""

    whole: float
    swaps: Mapping[str, float] = field(default_factory=dict)
    choices: tuple[str, ...] = ()
    origin: str = "measured"

    @property
    def part(self) -> float:
        return math.prod((self.whole, *self.swaps.values()))


class Slow:
    """A worker on a machine with slow spells, whose clock goes on as it measures."""

    def __init__(self, seed: int, best_ms: float) -> None:
        self.random = random.Random(seed)
        self.best_ms, self.now = best_ms, MEASURED_S
        self.until, self.pace = 0.0, 1.0
        self.efforts: list[Any] = []

    def time_programs(self, graph: object, plans: list[Timed], effort: Any, seed: int) -> Any:
        self.now += BUILD_S * len(plans)
        self.efforts.append(effort)
        makes = [p.part * math.exp(self.random.gauss(0, MAKE)) for p in plans]
        rounds: list[list[float]] = []
        end = self.now + effort.budget_s
        while len(rounds) < 5 or (self.now < end and not known_to(effort.tolerance, rounds)):
            self.now += 2 * sum(makes) * self.best_ms / 1e3 * self.pace_now()
            noise = [math.exp(self.random.gauss(0, NOISE)) for _ in plans]
            times = (m * n for m, n in zip(makes, noise, strict=True))
            rounds.append([1e3 * self.best_ms * self.pace * part for part in times])
        return [Timing(samples) for samples in zip(*rounds, strict=True)]

    def pace_now(self) -> float:
        if self.now > self.until:
            self.pace = self.random.choice(STAGES)
            self.until = self.now + self.random.expovariate(1 / PHASE_S)
        return self.pace


def known_to(tolerance: float, rounds: list[list[float]]) -> bool:
    """As plans that take turns are timed; looked at now and then, as it takes long."""
    if len(rounds) < 10 or len(rounds) % 4:
        return False
    timings = timing.evened([Timing(samples) for samples in zip(*rounds, strict=True)])
    return all(found.settled(tolerance) for found in timings)


def found_by_search(
    seed: int, monkeypatch: pytest.MonkeyPatch, best_ms: float = 4.0, gain: float = 0.0
) -> tuple[float, Slow]:
    """How much longer than the best one the plan takes that a search with this seed ends with, and
    the worker. A runner-up gains at most so much.
    """
    draw = random.Random(seed)
    wholes = [1.0, 1.02, *(draw.uniform(1.03, 1.15) for _ in range(6))]
    plans = [Timed(whole, choices=(str(whole),)) for whole in wholes]
    swaps = [{f"{i}": draw.uniform(1.0 - gain, 1.05)} for i in range(14)]
    worker = Slow(seed, best_ms)
    monkeypatch.setattr(ranking, "swaps", lambda *_: [*swaps])
    monkeypatch.setattr(ranking, "affordable", lambda plans, *_: plans)
    monkeypatch.setattr(comparison, "complexity", lambda plan: (0, len(plan.swaps)))
    monkeypatch.setattr(
        improvement,
        "swapped",
        lambda plan, graph, space, swap: replace(plan, swaps={**plan.swaps, **swap}),
    )
    costs = SimpleNamespace(costs=SimpleNamespace(outcomes={}), progress=lambda *_: None)
    budget = Budget(BUDGET_S, clock=lambda: worker.now)
    budget._start = 0.0
    space = SimpleNamespace(arch=SimpleNamespace(kind="cpu"))
    sought: Any = SimpleNamespace(graph=None, problem=None, space=space)
    parts: Any = (worker, budget, costs, silent)
    run = Run(sought, SearchOptions(), *parts, machine=QUIET)
    first: Any = draw.sample(plans, len(plans))
    plan: Any = ranking.rank(run, Contenders.of(labelled(COVER, first)))[0]
    return plan.part, worker


def test_searches_with_other_seeds_end_within_three_percent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 100 times three searches 96 do; with one make of each plan, whose times had the machine's
    slow spells, 81 did. With 25 ms a call 52 and 41 of 60.
    """
    monkeypatch.setattr(policy, "TIE_RESAMPLES", 40)
    found = [found_by_search(seed, monkeypatch)[0] for seed in range(60)]
    threes = [found[i : i + 3] for i in range(0, len(found), 3)]
    alike = sum(max(three) <= 1.03 * min(three) for three in threes)
    assert alike >= 0.95 * len(threes), found
    assert sum(part > 1.03 for part in found) <= 2, found


def test_runners_up_are_timed_more_finely_than_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known to 2 %, those that gain tied with those that do not, where calls are short."""
    monkeypatch.setattr(policy, "TIE_RESAMPLES", 40)
    _, worker = found_by_search(0, monkeypatch, best_ms=0.4, gain=0.03)
    refining = [e for e in worker.efforts if e.budget_s <= policy.REFINING_S]
    others = [e for e in worker.efforts if e.budget_s > policy.REFINING_S]
    assert {effort.tolerance for effort in refining} == {policy.IMPROVED_TO}
    assert {effort.tolerance for effort in others} == {policy.RANKED_TO["cpu"]}
