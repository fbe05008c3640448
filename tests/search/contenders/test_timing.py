"""Whole plans are timed in turns, also where some crash the worker."""

from __future__ import annotations

from plantune.base.outcome import Rejected
from plantune.errors import WorkerDied
from plantune.measure.timing import Effort
from plantune.search.contenders.timing import time_plans

from .runs import FakeWorker, run_of

EFFORT = Effort(budget_s=0.1)


def test_plans_are_timed_together():
    worker = FakeWorker()
    found = time_plans(run_of(worker), ["a", "bb"], EFFORT)
    assert [timing.median_us for timing in found] == [1, 2]
    assert worker.asked == [["a", "bb"]]


def test_one_that_crashes_the_worker_costs_no_other():
    worker = FakeWorker(deadly=["bb"])
    found = time_plans(run_of(worker), ["a", "bb", "ccc"], EFFORT)
    assert found[1] == Rejected("crash", "bb: an illegal memory access")
    assert [found[0].median_us, found[2].median_us] == [1, 3]
    assert worker.asked[-1] == ["a", "ccc"]


def test_those_that_die_together_alone_have_the_times_they_had_alone():
    class Crowded(FakeWorker):
        def time_programs(self, graph, plans, effort, seed=0):
            if len(plans) > 1:
                raise WorkerDied("no memory is left")
            return super().time_programs(graph, plans, effort, seed)

    found = time_plans(run_of(Crowded(deadly=["bb"])), ["a", "bb", "ccc"], EFFORT)
    assert [found[0].median_us, found[2].median_us] == [1, 3]
    assert found[1].stage == "crash"


def test_where_all_die_all_are_rejected():
    found = time_plans(run_of(FakeWorker(deadly=["a", "b"])), ["a", "b"], EFFORT)
    assert [outcome.stage for outcome in found] == ["crash", "crash"]
