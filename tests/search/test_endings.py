"""What a search keeps where no plan is left, and where it is interrupted after a race."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from plantune.base.outcome import Rejected
from plantune.devices.machine import cpu_environment
from plantune.errors import CannotJudge, MeasureTimeout, OutOfTime, WorkerDied, WrongResult
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.measure.racing.race import Race
from plantune.measure.timing import Timing, ratio_interval
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.problem import Problem
from plantune.plans.workload import Workload
from plantune.search.endings import why_needless
from plantune.search.results import SearchOptions
from plantune.search.search import Search
from plantune.search.sought import Sought

WRONG = WrongResult("the gradient is off by 5e15 of its size", 5e15, 0.5)


class FakeWorker:
    """Its race ends as `ends` says, one plan after the other, the last of them again and again; a
    number is how long plantune takes, beside eager's 3.
    """

    threads = limits = environment = None

    def __init__(self, *ends, timed=None):
        self.ends, self.timed = list(ends), timed
        self.raced = []

    def start(self, cut_at=None):
        pass

    def check_and_time(self, step, candidate, arch, effort=None, seeds=(0, 1)):
        raise OutOfTime("build was cut off")

    def time_programs(self, graph, plans, effort, seed=0):
        if isinstance(self.timed, Exception):
            raise self.timed
        return [self.timed or Timing((float(1 + place),) * 5) for place in range(len(plans))]

    def rooflines(self, steps, arch):
        return [1.0] * len(steps)

    def race(self, raced, plan, routes, effort, seed):
        self.raced.append(plan)
        end = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]
        if isinstance(end, BaseException):
            raise end
        timings = {"plantune": Timing((end,) * 9), "eager": Timing((3.0,) * 9)}
        return Race(timings, {}, "eager", ratio_interval(*timings.values()))


@pytest.fixture
def search(tmp_path, monkeypatch):
    """Makes searches in a database of their own, where no plans are shipped."""
    for reader in ("plans.database.stored", "search.contenders.known"):
        monkeypatch.setattr(f"plantune.{reader}.data_folder", lambda name: tmp_path / name)
    workload = Workload("se_resnet9_fixup", 1)
    with PlanDatabase.open(tmp_path / "plans.db") as database:

        def make(graph=workload.graph, problem=workload.problem):
            sought = Sought(graph, problem)
            return Search(sought, SearchOptions(60.0), database, cpu_environment())

        make.database = database
        yield make


def stored(search):
    return [(row.plan.route, row.status) for row in search.database.plans()]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (WRONG, "no plan got through its race: the gradient is off by 5e15"),
        (WorkerDied("the worker died during time: SIGSEGV"), "race: the worker died during time"),
        (MeasureTimeout("time took over 60 s"), "race: time took over 60 s"),
        (CannotJudge("the framework itself overflows"), "^eager runs the network: the framework"),
    ],
)
def test_eager_runs_where_no_plan_gets_through_its_race(search, error, reason):
    result = search().run(FakeWorker(error))
    assert (result.complete, result.race, result.plan.route) == (True, None, "eager")
    assert re.search(reason, result.unraced)
    assert stored(search) == [("eager", "complete")]


@pytest.mark.parametrize(
    "timed",
    [Rejected("numerics", "the framework itself fails"), CannotJudge("the framework itself fails")],
)
def test_and_where_none_runs_at_all(search, timed):
    worker = FakeWorker(2.0, timed=timed)
    result = search().run(worker)
    assert (result.plan.route, worker.raced) == ("eager", [])
    assert "the framework itself fails" in result.unraced


def test_a_plan_that_calls_used_and_that_fails_now_is_replaced(search):
    assert search().run(FakeWorker(2.0)).plan.route == "program"
    assert search().run(FakeWorker(WRONG)).plan.route == "eager"
    assert search.database.plans()[0].plan.route == "eager"


def test_also_if_there_is_no_time_for_another_one(search):
    """It would stay, were it not wrong."""
    first = search().run(FakeWorker(2.0)).plan
    late = OutOfTime("time was cut off")
    assert search().run(FakeWorker(late)).known.plan == first
    with pytest.warns(UserWarning, match="dropped: the gradient is off"):
        result = search().run(FakeWorker(WRONG, late))
    assert (result.known, result.plan.route) == (None, "eager")


def test_what_was_dropped_before_another_plan_won_is_told(search):
    with pytest.warns(UserWarning, match="was dropped: the gradient is off"):
        result = search().run(FakeWorker(WRONG, 2.0))
    assert (result.unraced, result.plan.route) == (None, "program")


class TestInterrupted:
    def test_after_the_race_the_plan_is_judged_and_kept(self, search, monkeypatch):
        def interrupted(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr("plantune.search.contenders.finish.race_again", interrupted)
        it = search()
        with pytest.raises(KeyboardInterrupt):
            it.run(FakeWorker(2.0))
        result = it.partial()
        assert (result.complete, result.is_raced, result.plan.route) == (False, True, "program")
        assert stored(search) == [("program", "complete")]

    def test_a_plan_that_lost_its_race_does_not_run(self, search, monkeypatch):
        def interrupted(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr("plantune.search.contenders.finish.race_again", interrupted)
        it = search()
        with pytest.raises(KeyboardInterrupt):
            it.run(FakeWorker(4.0))
        assert it.partial().plan.route == "eager"

    def test_once_it_is_kept_it_is_not_kept_twice(self, search, monkeypatch):
        it = search()

        def interrupted(plan):
            raise KeyboardInterrupt

        monkeypatch.setattr(it, "_publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            it.run(FakeWorker(2.0))
        assert it.partial().is_raced
        assert stored(search) == [("program", "complete")]

    def test_before_a_race_it_is_partial(self, search):
        it = search()
        with pytest.raises(KeyboardInterrupt):
            it.run(FakeWorker(KeyboardInterrupt()))
        assert not it.partial().is_raced
        assert [status for _, status in stored(search)] == ["partial"]


def test_each_failure_of_a_candidate_stays_a_row(search):
    asked, wrong = [], Rejected("numerics", "it is wrong")

    class Failing(FakeWorker):
        def check_and_time(self, step, candidate, arch, effort=None, seeds=(0, 1)):
            if len(asked) == 3:
                raise OutOfTime("build was cut off")
            asked.append((step, candidate))
            return wrong

    assert search().run(Failing(WRONG)).nothing_left
    kept = [search.database.trials(s.signature, cpu_environment())[c] for s, c in asked]
    assert kept == [wrong] * 3


def graph_of(module, *shape):
    return extract(module.eval(), TensorType(shape))


NOTHING = [
    (nn.Sequential(), (2, 8), "no op"),
    (nn.Linear(8, 4), (0, 8), "shape 0x8 has no elements"),
]


@pytest.mark.parametrize(("module", "shape", "why"), NOTHING)
def test_where_nothing_can_be_faster_nothing_is_measured(search, module, shape, why):
    """Neither plan could be read again: one has no steps, one is for a batch of 0."""
    graph = graph_of(module, *shape)
    worker = FakeWorker(2.0)
    it = search(graph, Problem.of(graph, "cpu", "Net"))
    result = it.run(worker)
    assert (result.plan.route, result.candidates, worker.raced) == ("eager", 0, [])
    assert why in result.unraced
    assert stored(search) == []


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_plan_that_can_be_read_again_is_stored(search):
    graph = graph_of(nn.Linear(8, 0), 2, 8)
    result = search(graph, Problem.of(graph, "cpu", "Net")).run(FakeWorker(2.0))
    assert "has no elements" in result.unraced
    assert stored(search) == [("eager", "complete")]


class Cat(nn.Module):
    """A cache that is empty in the first call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.empty(0, 8))

    def forward(self, x):
        return torch.cat([self.cache, x * 2])


@pytest.mark.parametrize("module", [nn.Linear(8, 4), Cat()])
def test_a_search_is_needed_where_ops_make_something(module):
    graph = graph_of(module, 2, 8)
    assert why_needless(graph, Problem.of(graph, "cpu", "Net")) is None
