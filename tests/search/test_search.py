"""A search that is short of time: what it keeps without a ranking or a race."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plantune.devices.machine import cpu_environment
from plantune.errors import OutOfTime
from plantune.measure.machine_state import State
from plantune.measure.racing.race import Race
from plantune.measure.timing import Timing, ratio_interval
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.workload import Workload
from plantune.search import policy
from plantune.search.budget import Budget
from plantune.search.results import SearchOptions
from plantune.search.search import Search
from plantune.search.sought import Sought


def search_of(workload, *arguments):
    return Search(Sought(workload.graph, workload.problem), *arguments)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class HastyWorker:
    """Is cut off in these requests."""

    threads = limits = environment = None

    def __init__(self, *cut_off):
        self.cut_off = cut_off
        self.asked = []
        self.plans = []

    def start(self, cut_at=None):
        self.cut_at = cut_at
        if "start" in self.cut_off:
            raise OutOfTime("the time was over before the measuring worker started")

    def check_and_time(self, step, candidate, arch, effort=None, seeds=(0, 1)):
        raise OutOfTime("build was cut off")

    def time_programs(self, graph, plans, effort, seed=0):
        self.asked.append(list(plans))
        if "ranking" in self.cut_off:
            raise OutOfTime("build was cut off")
        return [Timing((float(1 + place),) * 5) for place in range(len(plans))]

    def rooflines(self, steps, arch):
        return [1.0] * len(steps)

    def race(self, raced, plan, routes, effort, seed):
        self.plans.append(plan)
        assert effort.cut_at is not None
        if "race" in self.cut_off:
            raise OutOfTime("time was cut off")
        timings = {name: Timing((2.0 if name == "plantune" else 3.0,) * 9) for name in ORDER}
        return Race(timings, {}, "eager", ratio_interval(timings["plantune"], timings["eager"]))


ORDER = ("plantune", "eager")


@pytest.fixture
def hasty(tmp_path, monkeypatch):
    """A search of a database of its own, where no plans are shipped."""
    for reader in ("plans.database.stored", "search.contenders.known"):
        monkeypatch.setattr(f"plantune.{reader}.data_folder", lambda name: tmp_path / name)
    with PlanDatabase.open(tmp_path / "plans.db") as database:
        yield search_of(
            Workload("se_resnet9_fixup", 1), SearchOptions(60.0), database, cpu_environment()
        )


def test_the_budget_begins_when_the_search_is_made(hasty, monkeypatch):
    """What was spent before, waiting for a quiet machine and the worker's first process count."""
    clock = Clock()
    monkeypatch.setattr(
        "plantune.search.search.Budget",
        lambda seconds, spent_s: Budget(seconds, clock, spent_s=spent_s),
    )
    settings = replace(hasty.options, spent_s=3.0)
    search = Search(hasty.sought, settings, hasty.database, hasty.environment)
    clock.now += 12
    worker = HastyWorker("start")
    result = search.run(worker)
    assert result.spent_s == 15
    assert worker.cut_at == pytest.approx(100 - 3 + 60 * 1.12)


@pytest.mark.parametrize("stage", ["start", "race"])
def test_without_a_race_the_network_runs_as_it_is(hasty, stage):
    result = hasty.run(HastyWorker(stage))
    assert (result.complete, result.race, result.known) == (True, None, None)
    assert (result.plan.route, result.plan.origin) == ("eager", "framework")
    assert not result.exhausted
    assert result.candidates > 100
    (stored,) = hasty.database.plans()
    assert (stored.plan, stored.status) == (result.plan, "complete")


def test_without_a_race_a_known_plan_stays(hasty):
    first = hasty.run(HastyWorker())
    assert first.race is not None
    again = Search(hasty.sought, hasty.options, hasty.database, hasty.environment)
    result = again.run(HastyWorker("race"))
    assert result.known.plan == result.plan == first.plan
    assert len(hasty.database.plans()) == 1


def test_without_a_ranking_there_is_a_race(hasty):
    """Nothing was measured either, so what needs no compiler is as good a guess as any."""
    worker = HastyWorker("ranking")
    result = hasty.run(worker)
    assert result.race is not None
    assert worker.plans[0] in worker.asked[0]
    assert hasty.database.plans()[0].plan == result.plan


def test_on_a_busy_machine_few_plans_rank_and_it_is_said(hasty, monkeypatch):
    """Each call may take a hundred times as long there."""
    monkeypatch.setattr(policy, "FEW_PLANS", 2)
    quiet, busy = HastyWorker(), HastyWorker()
    hasty.run(quiet)
    again = Search(hasty.sought, hasty.options, hasty.database, hasty.environment)
    state = State(2, others=1.9, names=("yes", "yes"))
    monkeypatch.setattr(again.log.machine, "look", lambda: state)
    result = again.run(busy)
    by_hand = hasty.sought.by_hand()
    ranked = [set(plan.choices) for plan in busy.asked[-1]]
    assert len(ranked) == policy.FEW_PLANS + 1 < len(quiet.asked[-1])
    assert set(by_hand.choices) in ranked
    assert result.plan.evidence["machine"] == "busy"
    assert "other processes took 1.9 of 2 cores (yes, yes)" in result.notes[0]


def test_where_the_time_is_over_nothing_is_compared(hasty, monkeypatch):
    class Late(HastyWorker):
        def start(self, cut_at=None):
            monkeypatch.setattr(Budget, "left_s", 0.0)

    worker = Late()
    result = hasty.run(worker)
    assert (result.race, worker.asked, worker.plans) == (None, [], [])
