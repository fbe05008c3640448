"""What a search does with plans that take the worker along, and what it races against."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from plantune.errors import OutOfTime, WorkerDied
from plantune.machine import cpu_environment
from plantune.measure.machine_state import State
from plantune.measure.outcome import Rejected
from plantune.measure.race import Race
from plantune.measure.timing import Effort, Timing, ratio_interval
from plantune.plan_db.database import PlanDatabase
from plantune.problem import Problem
from plantune.search.budget import Budget
from plantune.search.search import Search, Settings

EFFORT = Effort(budget_s=0.1)


class FakeWorker:
    """Dies of some plans; times are their number."""

    def __init__(self, deadly=()):
        self.deadly = deadly
        self.asked = []
        self.raced = None
        self.plans = []

    def time_programs(self, graph, plans, effort, seed=0):
        self.asked.append(list(plans))
        for plan in plans:
            if plan in self.deadly:
                raise WorkerDied(f"{plan}: an illegal memory access")
        return [Timing((float(len(plan)),) * 5) for plan in plans]

    def race(self, workload, plan, baselines, effort, seed):
        self.raced = (workload, baselines)
        self.plans.append(plan)
        if plan in self.deadly:
            raise WorkerDied(f"{plan}: an illegal memory access")
        return "the race"


@pytest.fixture
def search():
    return Search(Problem("se_resnet9_fixup", 1), Settings(), None, None)


def test_plans_are_timed_together(search):
    worker = FakeWorker()
    found = search._timed(worker, ["a", "bb"], EFFORT)
    assert [timing.median_us for timing in found] == [1, 2]
    assert worker.asked == [["a", "bb"]]


def test_one_that_takes_the_worker_along_costs_no_other(search):
    worker = FakeWorker(deadly=["bb"])
    found = search._timed(worker, ["a", "bb", "ccc"], EFFORT)
    assert found[1] == Rejected("crash", "bb: an illegal memory access")
    assert [found[0].median_us, found[2].median_us] == [1, 3]
    assert worker.asked[-1] == ["a", "ccc"]


def test_where_all_die_all_are_rejected(search):
    found = search._timed(FakeWorker(deadly=["a", "b"]), ["a", "b"], EFFORT)
    assert [outcome.stage for outcome in found] == ["crash", "crash"]


@pytest.mark.parametrize(
    ("arch", "seconds", "compiled"),
    [
        ("cpu", 60.0, {"compile-default"}),
        ("cpu", 10.0, set()),
        ("sm90", 60.0, {"compile-default", "compile-reduce-overhead"}),
        ("sm90", 10.0, set()),
    ],
)
def test_what_compiles_joins_the_race_where_there_is_time(search, arch, seconds, compiled):
    worker = FakeWorker()
    search._race(worker, SimpleNamespace(arch=arch), Budget(seconds))
    _, baselines = worker.raced
    assert {name for name in baselines if name.startswith("compile")} == compiled
    assert {"eager", "eager-channels-last", "torchscript"} <= set(baselines)


def test_named_baselines_race_in_any_case():
    settings = Settings(baselines=("compile-max-autotune",))
    search = Search(Problem("se_resnet9_fixup", 1, arch="sm90"), settings, None, None)
    worker = FakeWorker()
    search._race(worker, SimpleNamespace(arch="sm90"), Budget(1.0))
    assert worker.raced[1] == ("compile-max-autotune",)
    assert worker.raced[0].arch == "sm90"


def plans(*names):
    return [Named(name) for name in names]


class Named(str):
    """A plan for tests."""

    arch = "cpu"


def test_a_plan_that_fails_in_its_race_is_given_up_and_told(search):
    worker = FakeWorker(deadly=["a"])
    with pytest.warns(UserWarning, match="given up in its race: a: an illegal memory access"):
        found = search._raced(worker, plans("a", "b", "c"), Budget(1.0))
    assert found == ("b", "the race")


def test_the_last_one_is_always_tried(search):
    worker = FakeWorker(deadly=["a", "b", "c", "d"])
    with pytest.warns(UserWarning, match="given up"):
        assert search._raced(worker, plans("a", "b", "c", "d", "e"), Budget(1.0))[0] == "e"
    assert worker.plans == ["a", "b", "c", "e"]


def test_where_no_race_ends_the_search_does(search):
    with (
        pytest.warns(UserWarning, match="given up"),
        pytest.raises(WorkerDied, match="b: an illegal"),
    ):
        search._raced(FakeWorker(deadly=["a", "b"]), plans("a", "a", "b"), Budget(1.0))


class HastyWorker(FakeWorker):
    """Is cut off in these requests."""

    def __init__(self, *cut_off):
        super().__init__()
        self.cut_off = cut_off

    def start(self, cut_at=None):
        if "start" in self.cut_off:
            raise OutOfTime("the time was over before the measuring worker started")

    def check_and_time(self, step, candidate, arch, effort=None, seeds=(0, 1)):
        raise OutOfTime("build was cut off")

    def time_programs(self, graph, plans, effort, seed=0):
        self.asked.append(list(plans))
        if "ranking" in self.cut_off:
            raise OutOfTime("build was cut off")
        return [Timing((float(1 + place),) * 5) for place in range(len(plans))]

    def race(self, workload, plan, baselines, effort, seed):
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
    monkeypatch.setattr("plantune.plan_db.stored.data_folder", lambda name: tmp_path / name)
    with PlanDatabase.open(tmp_path / "plans.db") as database:
        yield Search(Problem("se_resnet9_fixup", 1), Settings(60.0), database, cpu_environment())


@pytest.mark.parametrize("phase", ["start", "race"])
def test_without_a_race_the_network_runs_as_it_is(hasty, phase):
    result = hasty.run(HastyWorker(phase))
    assert (result.complete, result.race, result.known) == (True, None, None)
    assert (result.plan.runner, result.plan.origin) == ("eager", "default")
    assert not result.exhausted
    assert result.candidates > 100
    (stored,) = hasty._database.plans()
    assert (stored.plan, stored.status) == (result.plan, "complete")


def test_without_a_race_a_known_plan_stays(hasty):
    first = hasty.run(HastyWorker())
    assert first.race is not None
    again = Search(hasty.problem, hasty.settings, hasty._database, hasty._environment)
    result = again.run(HastyWorker("race"))
    assert result.known.plan == result.plan == first.plan
    assert len(hasty._database.plans()) == 1


def test_without_a_ranking_there_is_a_race(hasty):
    """Nothing was measured either, so what needs no compiler is as good a guess as any."""
    worker = HastyWorker("ranking")
    result = hasty.run(worker)
    assert result.race is not None
    assert worker.plans[0] in worker.asked[0]
    assert hasty._database.plans()[0].plan == result.plan


def test_on_a_busy_machine_few_plans_rank_and_it_is_said(hasty, monkeypatch):
    """Each call may take a hundred times as long there."""
    quiet, busy = HastyWorker(), HastyWorker()
    hasty.run(quiet)
    again = Search(hasty.problem, hasty.settings, hasty._database, hasty._environment)
    state = State(2, others=1.9, names=("yes", "yes"))
    monkeypatch.setattr(again._machine, "look", lambda: state)
    result = again.run(busy)
    assert len(busy.asked[-1]) == 3
    assert result.plan.evidence["machine"] == "busy"
    assert "other processes took 1.9 of 2 cores (yes, yes)" in result.notes[0]


def test_where_the_time_is_over_nothing_is_compared(hasty, monkeypatch):
    class Late(HastyWorker):
        def start(self, cut_at=None):
            monkeypatch.setattr(Budget, "left_s", 0.0)

    worker = Late()
    result = hasty.run(worker)
    assert (result.race, worker.asked, worker.plans) == (None, [], [])
