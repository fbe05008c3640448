"""The first seconds of a search: known plans are built, then timed before anything else."""

from __future__ import annotations

import time

import pytest

from plantune.default_plans import hand_plan
from plantune.measure.timing import Timing
from plantune.search.beginning import Beginning, begun
from plantune.search.budget import Budget
from plantune.search.builds import Builds
from plantune.search.phases import Run
from plantune.search.results import Settings, silent
from plantune.search.step_search import StepSearch

pytestmark = pytest.mark.usefixtures("as_with_a_compiler")
PLENTY = 4000.0


class Timer:
    """A worker for which every plan takes as long."""

    def __init__(self):
        self.timed = []

    def time_programs(self, graph, plans, effort, seed=0):
        self.timed += plans
        return [Timing((50.0,) * 8)] * len(plans)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def source(candidate):
    return candidate.key if candidate.candidate.family == "winograd" else None


@pytest.fixture
def plan(graph, space):
    made = hand_plan(graph, space, network="small")
    assert "winograd" in {choice.candidate.family for choice in made.choices}
    return made


@pytest.fixture
def begin(graph, space, measurer, store, plan):
    """A search that knows the plan, begun with these builds."""

    def begin(builds, budget):
        steps = StepSearch(graph, space, measurer, store, builds=builds)
        worker = Timer()
        run = Run(graph, None, space, Settings(), worker, budget, steps, silent)
        builds.want(steps.candidates)
        return begun(run, [plan], None), worker

    return begin


@pytest.mark.parametrize("paused", [True, False])
def test_a_plan_is_timed_when_its_kernels_are_built(begin, plan, measurer, paused):
    """Its steps are measured meanwhile, but for those that would pause the builds."""

    def build(candidate):
        while not (measurer.asked or paused):
            time.sleep(0.001)
        built.append(candidate.candidate.family)

    built = []
    builds = Builds(build, source, 1, paused=paused)
    found, worker = begin(builds, Budget(PLENTY))
    builds.close()
    assert (found.timed, found.untimed, found.fastest_us) == ([plan], [], 50.0)
    assert worker.timed == [plan]
    assert "winograd" in built
    assert (measurer.asked == []) == paused


def test_one_whose_kernels_take_too_long_waits_and_leaves_others_time(begin, plan):
    class Never(Builds):
        def wait(self, candidates, seconds):
            clock.now += seconds
            return super().wait(candidates, 0.0)

    clock = Clock()
    builds = Never(lambda candidate: time.sleep(PLENTY), source, 1, paused=True)
    budget = Budget(60.0, clock)
    to_measure = budget.left_for("measuring")
    found, worker = begin(builds, budget)
    assert found == Beginning(untimed=[plan])
    assert worker.timed == []
    assert budget.left_for("measuring") == pytest.approx(to_measure / 4)


def test_what_takes_long_to_build_is_not_waited_for(begin, plan, graph, space, monkeypatch):
    """There is time for such kernels if the worker builds them, or there is none."""
    monkeypatch.setattr("plantune.search.beginning.LONG_BUILD_S", 1.0)
    builds = Builds(lambda candidate: time.sleep(PLENTY), source, 1, paused=True)
    assert begin(builds, Budget(PLENTY))[0].timed == [plan]
    assert begin(builds, Budget(12.0))[0].untimed == [plan]


def test_what_an_earlier_search_built_is_not_waited_for(begin, plan, graph, space, measurer, store):
    StepSearch(graph, space, measurer, store).begin_with(plan, Budget(PLENTY), silent)
    builds = Builds(lambda candidate: time.sleep(PLENTY), source, 1, paused=True)
    found, _ = begin(builds, Budget(PLENTY))
    assert found.timed == [plan]
