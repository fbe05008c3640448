"""What has no time left is not started, and what takes long to build does not rank."""

from __future__ import annotations

import math
from contextlib import closing
from functools import partial

import pytest

from plantune.base.canonical import Attrs
from plantune.base.outcome import Rejected
from plantune.errors import OutOfTime
from plantune.kernels.family import Candidate
from plantune.kernels.registry import family_named
from plantune.plans.guess import framework_plan, hand_plan
from plantune.plans.planner.candidates import LONG_BUILD_S
from plantune.plans.workload import Workload
from plantune.search.budget import Budget, Durations
from plantune.search.builds import Builds, built_as
from plantune.search.contenders.affordable import affordable, building_s
from plantune.search.policy import CACHED, DIRECT
from plantune.search.results import silent
from plantune.search.step_search import StepSearch

FRAMEWORK = Candidate("framework", Attrs(layout="nchw"))
COMPILED = Candidate("inductor", Attrs(layout="nchw"))
LONG = family_named("inductor")


def test_the_next_one_takes_as_long_as_the_last_ones():
    durations = Durations()
    first = durations.seconds_of(COMPILED)
    assert first > family_named("inductor").build_s
    assert durations.seconds_of(COMPILED, built=True) < 1
    for seconds in (90.0, 1.0, 3.0, 2.0, 1.0):
        durations.learn(COMPILED, seconds)
    assert durations.seconds_of(COMPILED) == 3.0
    assert durations.seconds_of(FRAMEWORK) < 1


def test_what_compiles_nothing_is_built_at_once():
    durations = Durations()
    durations.learn(FRAMEWORK, 9.0)
    assert durations.build_s(FRAMEWORK, cached=False) == 0
    anew = durations.build_s(COMPILED, cached=False)
    assert durations.build_s(COMPILED, cached=True) == CACHED * anew


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def slow(measurer, monkeypatch):
    """A measurer for which the clock moves, by so many seconds for each family."""
    clock = Clock()
    monkeypatch.setattr("plantune.search.worker_pool.time.monotonic", clock)
    measure = measurer.measure

    def measured(step, candidate, limit_us):
        clock.now += measurer.seconds.get(candidate.family, 0.1)
        return measure(step, candidate, limit_us)

    measurer.seconds = {}
    measurer.clock = clock
    measurer.measure = measured
    return measurer


def test_measuring_ends_in_time(graph, space, slow, store):
    slow.seconds = {"inductor": 6.0, "winograd": 7.0}
    search = StepSearch(graph, space, slow, store)
    budget = Budget(40.0, slow.clock)
    search.run(budget, silent)
    asked = len(slow.asked)
    assert 0 < asked < len({item.key for item in search.candidates})
    assert not search.complete
    # The first of a family may take longer than it was taken for.
    assert slow.clock.now <= 40 - 14 - 6 + 7.0
    # With time enough the rest is measured, too.
    again = StepSearch(graph, space, slow, store)
    again.run(Budget(4000.0, slow.clock), silent)
    assert again.complete
    assert len(slow.asked) > asked


@pytest.mark.parametrize(
    ("family", "has_long"), [("onednn_conv", True), ("inductor", True), ("onednn_conv", False)]
)
@pytest.mark.usefixtures("as_with_a_compiler")
def test_what_was_cut_off_is_not_an_outcome(
    graph, space, slow, store, monkeypatch, family, has_long
):
    """Before or amid what takes long to build, or where nothing does."""
    if not has_long:
        monkeypatch.setattr(LONG, "why_not_arch", lambda arch: "there is none")
    kept = slow.measure

    def cut_off(step, candidate, limit_us):
        if candidate.family == family:
            raise OutOfTime("check was cut off")
        return kept(step, candidate, limit_us)

    slow.measure = cut_off
    search = StepSearch(graph, space, slow, store)
    search.run(Budget(4000.0, slow.clock), silent)
    assert len(search.costs.outcomes) == len(slow.asked)
    assert not search.complete


def test_plans_that_take_long_to_build_are_left_out(graph, space, measurer, store):
    steps = StepSearch(graph, space, measurer, store)
    compiled = hand_plan(graph, space, network="small")
    plain = framework_plan(graph, space, network="small")
    needed = building_s(compiled, graph, space, steps)
    assert needed > 1
    assert affordable([compiled, plain], graph, space, steps, needed + 1) == [compiled, plain]
    assert affordable([compiled, plain], graph, space, steps, needed - 0.1) == [plain]
    # What this search ran is built.
    steps.run(Budget(4000.0), silent)
    steps.ran.update((s, c) for s, c in measurer.asked)
    assert building_s(compiled, graph, space, steps) <= needed


@pytest.mark.usefixtures("as_with_a_compiler")
def test_one_source_is_built_once_for_all_steps(space, measurer, store, monkeypatch):
    monkeypatch.setattr("plantune.kernels.cpu.cxx.carried_library", lambda *unit: None)
    graph = Workload("resnet18", 1).graph
    steps = StepSearch(graph, space, measurer, store)
    compiled = hand_plan(graph, space, network="resnet18", without=DIRECT)
    winograds = [c for c in compiled.choices if c.candidate.family == "winograd"]
    assert len(winograds) > 3
    one_s = steps.durations.build_s(winograds[0].candidate, cached=False)
    assert building_s(compiled, graph, space, steps) == one_s
    # Whichever step had it built.
    named = {c.candidate.family: c for c in steps.candidates}
    steps.ran.add(named["winograd"].key)
    assert building_s(compiled, graph, space, steps) == 0
    # Nor does what was built ahead and has not run yet.
    with closing(Builds(lambda c: None, partial(built_as, space.arch), 1)) as builds:
        builds.want([named["winograd"]])
        assert builds.wait([named["winograd"]], 10)
        ahead = StepSearch(graph, space, measurer, store, builds=builds)
        assert building_s(compiled, graph, space, ahead) == 0


class Wishes:
    """Has nothing built, and remembers what it was asked for."""

    threads = 1

    def __init__(self):
        self.wanted = []

    def want(self, candidates):
        self.wanted.append([c.build_s >= LONG_BUILD_S for c in candidates])

    def is_ready(self, candidate):
        return True

    def failure(self, candidate):
        return None


@pytest.mark.usefixtures("as_with_a_compiler")
def test_what_takes_long_to_build_comes_after_all_else(graph, space, measurer, store):
    """Beside such builds everything else takes longer, and mostly they are in vain."""
    builds = Wishes()
    search = StepSearch(graph, space, measurer, store, builds=builds)
    search.run(Budget(4000.0), silent)
    is_long = [any(found) for found in builds.wanted]
    assert not is_long[0]
    assert is_long == sorted(is_long)
    asked = [candidate.family == COMPILED.family for _, candidate in measurer.asked]
    first = asked.index(True)
    assert not any(asked[:first])
    families = {candidate.family for _, candidate in measurer.asked[:first]}
    assert {"direct_conv", "framework", "onednn_conv", "winograd"} <= families
    assert search.complete


def test_where_all_is_noisy_the_frameworks_ops_still_cover(graph, space, measurer, store):
    """A busy machine says nothing of a candidate; without it nothing would cover the graph."""
    measurer.measure = lambda step, candidate, limit_us: Rejected("noisy", "others ran")
    steps = StepSearch(graph, space, measurer, store)
    steps.run(Budget(4000.0), silent)
    (cost, cover), *_ = steps.covers(1)
    assert {item.candidate.family for item in cover} <= {"framework", "view"}
    assert 0 < cost < math.inf
    assert steps.framework().us < math.inf
