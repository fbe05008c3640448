"""The first seconds of a search: known plans are built, then timed before anything else."""

from __future__ import annotations

import threading
import time

import pytest

from plantune.errors import BuildError, OutOfTime
from plantune.measure.timing import Timing
from plantune.plans.guess import framework_plan, hand_plan
from plantune.plans.problem import Problem
from plantune.search.budget import Budget
from plantune.search.builds import Builds
from plantune.search.contenders.warm_start import WarmStart, warm_start
from plantune.search.policy import BUILDING, BUILDING_S
from plantune.search.results import SearchOptions, silent
from plantune.search.run import Run
from plantune.search.sought import Sought
from plantune.search.step_search import StepSearch

pytestmark = pytest.mark.usefixtures("as_with_a_compiler")
ENOUGH_S = 60.0


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
def plain(graph, space):
    return framework_plan(graph, space, network="small")


@pytest.fixture
def builder():
    """Makes builds that end with the test."""
    started, end = [], threading.Event()

    def make(build=lambda candidate: None, kind=Builds, **options):
        started.append(kind(build or (lambda candidate: end.wait()), source, 1, **options))
        return started[-1]

    yield make
    end.set()
    for builds in started:
        builds.close()


@pytest.fixture
def worker():
    return Timer()


@pytest.fixture
def begin(graph, space, measurer, store, plan, worker):
    """The warm start of a search that knows plans, with these builds."""

    def begin(builds, budget=None, known=(plan,), guess=None):
        steps = StepSearch(graph, space, measurer, store, builds=builds)
        budget = budget or Budget(ENOUGH_S)
        sought = Sought(graph, Problem.of(graph, "cpu", "small"))
        run = Run(sought, SearchOptions(), worker, budget, steps, silent)
        return warm_start(run, known, guess)

    return begin


@pytest.mark.parametrize("pauses", [True, False])
def test_a_plan_is_timed_when_its_kernels_are_built(begin, builder, plan, worker, measurer, pauses):
    """Its steps are measured meanwhile, but for those for which the builds would pause."""
    built = []

    def build(candidate):
        end = time.monotonic() + ENOUGH_S
        while not (measurer.asked or pauses) and time.monotonic() < end:
            time.sleep(0.001)
        built.append(candidate.candidate.family)

    found = begin(builder(build, pauses=pauses))
    assert (found.timed, found.untimed, found.fastest_us) == ([plan], [], 50.0)
    assert worker.timed == [plan]
    assert set(built) == {"winograd"}
    assert (measurer.asked == []) == pauses


@pytest.mark.parametrize("seconds", [30.0, 300.0])
def test_one_whose_kernels_take_too_long_waits_and_leaves_others_time(
    begin, builder, plan, plain, worker, seconds
):
    class Slow(Builds):
        def wait(self, candidates, seconds):
            clock.now += seconds
            return super().wait(candidates, 0.0)

    clock = Clock()
    budget = Budget(seconds, clock)
    to_measure = budget.left_for("measuring")
    found = begin(builder(None, Slow, pauses=True), budget, [plan, plain])
    assert (found.timed, found.untimed) == ([plain], [plan])
    assert worker.timed == [plain]
    waited_s = to_measure - budget.left_for("measuring")
    assert waited_s == pytest.approx(min(BUILDING * to_measure, BUILDING_S))


def test_beside_it_the_guess_is_timed_all_the_same(begin, builder, plan, plain):
    found = begin(builder(None, pauses=True), Budget(4.0), [plan, plain], plain)
    assert (found.timed, found.untimed) == ([plain], [plan])


def test_one_that_does_not_build_is_not_waited_for(begin, builder, plan, worker):
    def build(candidate):
        raise BuildError("error: expected ';'")

    begin(builder(build, pauses=True))
    assert worker.timed == [plan]  # the worker says what is wrong with it


def test_where_comparing_them_takes_too_long_all_wait(begin, builder, plan, plain, worker):
    def late(graph, plans, effort, seed=0):
        raise OutOfTime("it took too long")

    worker.time_programs = late
    assert begin(builder(), known=[plan, plain]) == WarmStart(untimed=[plan, plain])


@pytest.mark.parametrize(("budget_s", "is_timed"), [(20.0, True), (12.0, False)])
def test_what_takes_long_to_build_is_not_waited_for(
    begin, builder, plan, monkeypatch, budget_s, is_timed
):
    """There is time for such kernels if the worker builds them, or there is none."""
    monkeypatch.setattr("plantune.search.contenders.warm_start.LONG_BUILD_S", 1.0)
    found = begin(builder(None, pauses=True), Budget(budget_s))
    assert [plan] == [*(found.timed if is_timed else found.untimed)]


def test_what_an_earlier_search_built_is_not_waited_for(
    begin, builder, plan, graph, space, measurer, store
):
    StepSearch(graph, space, measurer, store).begin_with(plan, Budget(ENOUGH_S), silent)
    assert begin(builder(None, pauses=True), Budget(20.0)).timed == [plan]
