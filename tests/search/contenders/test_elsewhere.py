"""What other GPUs do while the first one ranks and races."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from plantune.base.outcome import Measured
from plantune.devices.gpus import Slot
from plantune.devices.machine import cpu_environment
from plantune.errors import MeasureTimeout, OutOfTime, WrongResult
from plantune.measure.racing.race import Race
from plantune.measure.timing import Timing, ratio_interval
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.workload import Workload
from plantune.search.budget import Budget
from plantune.search.contenders.elsewhere import compiled_elsewhere, prove_elsewhere, start_all
from plantune.search.results import SearchOptions
from plantune.search.search import Search
from plantune.search.sought import Sought

TIMES = {"plantune": Timing((2.0,) * 9), "eager": Timing((3.0,) * 9)}
RACE = Race(TIMES, {}, "eager", ratio_interval(TIMES["plantune"], TIMES["eager"]))


class Raced(SimpleNamespace):
    """A worker that races; `errors` are raised one after the other."""

    threads = limits = environment = None

    def __init__(self, *errors):
        super().__init__(errors=list(errors), asked=[], started=0, measured=0)

    def start(self, cut_at=None):
        self.started += 1

    def race(self, raced, plan, routes, effort=None, seed=0):
        self.asked.append((plan, tuple(routes or ())))
        if self.errors:
            raise self.errors.pop(0)
        return RACE

    def check_and_time(self, step, candidate, arch, effort=None, seeds=(0, 1)):
        self.measured += 1
        time.sleep(0.002)  # another one gets a turn
        return Measured(10.0, 9.0, 11.0, 9, 1e-7, 1e-6, True)

    def time_programs(self, graph, plans, effort, seed=0):
        return [Timing((4.0 + place,) * 5) for place in range(len(plans))]

    def rooflines(self, steps, arch):
        return [1.0] * len(steps)


def test_a_plan_is_proved_on_each_of_the_others():
    others = [Raced(), Raced()]
    prove_elsewhere(others, None, "plan", Budget(60.0))
    assert [each.asked for each in others] == [[("plan", ("eager",))]] * 2


@pytest.mark.parametrize("error", [WrongResult("wrong", 1.0, 0.1), MeasureTimeout("hangs")])
def test_one_that_finds_it_wrong_decides(error):
    with pytest.raises(type(error)):
        prove_elsewhere([Raced(), Raced(error)], None, "plan", Budget(60.0))


def test_without_time_a_plan_is_not_proved_and_that_is_said():
    with pytest.warns(UserWarning, match="not proved on every GPU"):
        prove_elsewhere([Raced(OutOfTime("over"))], None, "plan", Budget(60.0))


def test_rivals_compile_on_another_gpu_meanwhile(eventually):
    other = Raced()
    ready = compiled_elsewhere([other], None, ["compile-default"], Budget(60.0), 0)
    eventually(ready, "the race named who ran")
    assert other.asked == [(None, ("compile-default",))]
    assert compiled_elsewhere([], None, ["compile-default"], Budget(60.0), 0)() == frozenset()


def test_all_workers_start_beside_each_other():
    workers = [Raced(), Raced(), Raced()]
    start_all(workers, Budget(60.0).cut_at("racing"))
    assert [each.started for each in workers] == [1, 1, 1]


@pytest.fixture
def search(tmp_path, monkeypatch):
    """A search on two slots, in a database of its own, where no plans are shipped."""
    for reader in ("plans.database.stored", "search.contenders.known"):
        monkeypatch.setattr(f"plantune.{reader}.data_folder", lambda name: tmp_path / name)
    with PlanDatabase.open(tmp_path / "plans.db") as database:
        workload = Workload("se_resnet9_fixup", 1)
        options = SearchOptions(60.0, slots=(Slot("one"), Slot("two")))
        problem = workload.problem
        sought = Sought(workload.graph, problem)
        yield Search(sought, options, database, cpu_environment())


def test_a_search_measures_on_both_and_races_on_the_first(search):
    first, second = Raced(), Raced()
    result = search.run(first, second)
    assert result.complete
    assert first.measured
    assert second.measured
    assert first.measured + second.measured == result.measured
    assert [asked[1] for asked in second.asked] == [("compile-default",), ("eager",)]
    assert second.asked[-1][0].choices == result.plan.choices


def test_a_plan_that_is_wrong_on_the_second_is_dropped(search):
    first = Raced()
    second = Raced(WrongResult("compiling failed", 1.0, 0.1), WrongResult("wrong there", 1.0, 0.1))
    with pytest.warns(UserWarning, match="failed in its race and was dropped: wrong there"):
        result = search.run(first, second)
    dropped, kept = [plan for plan, _ in second.asked if plan is not None]
    assert kept.choices == result.plan.choices != dropped.choices
