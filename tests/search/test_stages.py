"""What a search does with plans that crash the worker, and what it races against."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from plantune.base.outcome import Rejected
from plantune.errors import CannotJudge, NoViableCandidate, OutOfTime, WorkerDied
from plantune.measure.timing import Effort, Timing
from plantune.plans.workload import Workload
from plantune.search.budget import Budget
from plantune.search.policy import MAKES
from plantune.search.ranking import close, evened, of_makes, whole
from plantune.search.results import SearchOptions, silent
from plantune.search.stages import (
    Failed,
    Run,
    _close_again,
    _race,
    makes_that_fit,
    race_first,
    time_plans,
)
from plantune.space.search_space import load_search_space

EFFORT = Effort(budget_s=0.1)


class FakeWorker:
    """Dies of some plans; times are their number."""

    def __init__(self, deadly=()):
        self.deadly = deadly
        self.asked = []
        self.efforts = []
        self.raced = None
        self.plans = []

    def time_programs(self, graph, plans, effort, seed=0):
        self.asked.append(list(plans))
        for plan in plans:
            if plan in self.deadly:
                raise WorkerDied(f"{plan}: an illegal memory access")
        return [Timing((float(len(plan)),) * 5) for plan in plans]

    def race(self, raced, plan, routes, effort, seed):
        self.raced = (raced.problem, routes)
        self.plans.append(plan)
        if plan in self.deadly:
            raise WorkerDied(f"{plan}: an illegal memory access")
        return "the race"


def run_of(worker, arch="cpu", seconds=1.0, **settings):
    """The stages of a search whose steps do not count."""
    workload = Workload("se_resnet9_fixup", 1, arch=arch)
    return Run(
        workload.graph,
        workload.problem,
        load_search_space(arch),
        SearchOptions(**settings),
        worker,
        Budget(seconds),
        steps=None,
        report=silent,
    )


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


@pytest.mark.parametrize(
    ("arch", "seconds", "compiled"),
    [
        ("cpu", 60.0, {"compile-default"}),
        ("cpu", 10.0, set()),
        ("sm90", 60.0, {"compile-default", "compile-reduce-overhead"}),
        ("sm90", 10.0, set()),
    ],
)
def test_what_compiles_joins_the_race_where_there_is_time(arch, seconds, compiled):
    worker = FakeWorker()
    _race(run_of(worker, arch, seconds), SimpleNamespace(arch=arch))
    _, routes = worker.raced
    assert {name for name in routes if name.startswith("compile")} == compiled
    assert {"eager", "eager-channels-last", "torchscript"} <= set(routes)


def test_no_race_begins_when_the_time_is_almost_up():
    worker = FakeWorker()
    with pytest.raises(OutOfTime):
        race_first(run_of(worker, seconds=0.4), ["a", "b"])
    assert worker.plans == []


def test_routes_are_compiled_one_after_the_other():
    """Two of 25 s each do not fit into 40 s: the stronger one joins."""
    worker = FakeWorker()
    _race(run_of(worker, "sm90", 40.0), SimpleNamespace(arch="sm90"))
    _, routes = worker.raced
    compiled = [name for name in routes if name.startswith("compile")]
    assert compiled == ["compile-reduce-overhead"]


@pytest.mark.parametrize(("nodes", "joins"), [(1300, True), (1822, False)])
def test_a_deep_network_compiles_for_longer(nodes, joins):
    """A race that is cut off while something compiles loses what the search found."""
    worker = FakeWorker()
    run = run_of(worker, "sm90", 45.0)
    graph = SimpleNamespace(nodes=[None] * nodes, backward_from=None)
    _race(replace(run, graph=graph), SimpleNamespace(arch="sm90"))
    assert ("compile-reduce-overhead" in worker.raced[1]) == joins


def test_named_routes_race_in_any_case():
    worker = FakeWorker()
    run = run_of(worker, "sm90", routes=("compile-max-autotune",))
    _race(run, SimpleNamespace(arch="sm90"))
    assert worker.raced[1] == ("compile-max-autotune",)
    assert worker.raced[0].arch == "sm90"


def plans(*names):
    return [Named(name) for name in names]


class Named(str):
    """A plan for tests."""

    arch = "cpu"

    @property
    def choices(self):
        return (str(self),)


def test_a_plan_that_fails_in_its_race_is_dropped():
    worker, failed = FakeWorker(deadly=["a"]), []
    assert race_first(run_of(worker), plans("a", "b", "c"), failed=failed) == ("b", "the race")
    assert failed == [Failed("a", "a: an illegal memory access")]


def test_the_last_one_is_always_tried():
    worker = FakeWorker(deadly=["a", "b", "c", "d"])
    assert race_first(run_of(worker), plans("a", "b", "c", "d", "e"))[0] == "e"
    assert worker.plans == ["a", "b", "c", "e"]


def test_so_is_the_one_that_calls_use():
    """What runs without having been tried here takes the place of nothing."""
    worker = FakeWorker(deadly=["a", "b", "c", "d"])
    ranked = plans("a", "b", "c", "d", "e", "f")
    assert race_first(run_of(worker), ranked, in_use=ranked[4])[0] == "e"
    assert worker.plans == ["a", "b", "c", "e"]


def test_where_no_plan_gets_through_its_race_all_reasons_are_told():
    failed = []
    with pytest.raises(NoViableCandidate, match=r"race: a: an illegal .*; b: an illegal"):
        race_first(run_of(FakeWorker(deadly=["a", "b"])), plans("a", "a", "b"), failed=failed)
    assert [each.plan for each in failed] == ["a", "b"]


def test_where_the_framework_cannot_be_judged_no_other_plan_is_tried():
    class Unjudged(FakeWorker):
        def race(self, raced, plan, *arguments):
            self.plans.append(plan)
            raise CannotJudge("the framework itself overflows")

    worker = Unjudged()
    with pytest.raises(CannotJudge):
        race_first(run_of(worker), plans("a", "b", "c"))
    assert worker.plans == ["a"]


class Drawing(FakeWorker):
    """In the first race of all plans luck decides; further makes, each with these times, tell."""

    def __init__(self, *more):
        super().__init__()
        self.more = more

    def time_programs(self, graph, plans, effort, seed=0):
        self.asked.append(list(plans))
        self.efforts.append(effort)
        return list(self.more) * (len(plans) // len(self.more))


def test_a_slow_phase_of_the_machine_slows_all_that_ran_then():
    """Of half the rounds each the median would lie between both speeds, by luck."""
    paces = (1.0, 1.7) * 5
    wobble = (1.0, 1.01, 0.99, 1.02, 1.0, 0.98, 1.01, 1.0, 0.99, 1.0)
    timed = [
        Timing(tuple(us * pace * w for pace, w in zip(paces, wobble, strict=True)))
        for us, wobble in ((100.0, wobble), (104.0, wobble[::-1]), (110.0, wobble[3:] + wobble[:3]))
    ]
    rejected = Rejected("crash", "")
    one, two, gone, three = evened([*timed[:2], rejected, timed[2]])
    assert gone == rejected
    assert max(one.samples_us) / min(one.samples_us) < 1.1
    assert two.median_us / one.median_us == pytest.approx(1.04, abs=0.02)
    assert three.median_us / one.median_us == pytest.approx(1.1, abs=0.02)
    assert evened(timed[:1]) == timed[:1]


def test_what_disturbs_one_call_alone_is_not_shared_out_to_the_others():
    """The middle one's time was the pace of each round: it always took the same, others did not."""
    wobble = [90.0, 110.0, 95.0, 105.0, 100.0] * 2
    steady, other = Timing((80.0,) * 10), Timing((120.0,) * 10)
    middle = Timing(tuple(wobble))
    found = evened([steady, middle, other])
    assert [sorted(set(timing.samples_us)) for timing in found] == [
        [80.0],
        sorted(set(wobble)),
        [120.0],
    ]


LUCKY, UNLUCKY, SLOW = (Timing((us,) * 5) for us in (99.0, 104.0, 112.0))


class TestPlansThatAreClose:
    def test_they_run_again_without_the_others(self):
        worker = Drawing(Timing((106.0,) * 9), Timing((100.0,) * 9))
        found = _close_again(run_of(worker), ["a", "b", "c"], [SLOW, LUCKY, UNLUCKY])
        assert worker.asked == [["b", "c"] * MAKES["cpu"]]
        assert [timing.samples for timing in found] == [5, 5 + 27, 5 + 27]
        assert fastest_of(found) == 2

    @pytest.mark.parametrize(("arch", "known_to"), [("cpu", 0.02), ("sm90", 0.005)])
    def test_what_slow_phases_made_noisy_is_not_repeated(self, arch, known_to):
        """The first ten rounds of all plans would have taken all the time of these."""
        worker = Drawing(Timing((104.0,) * 9), Timing((100.0,) * 9))
        _close_again(run_of(worker, arch), ["b", "c"], [LUCKY, UNLUCKY])
        (effort,) = worker.efforts
        assert (effort.retries, effort.relative, effort.tolerance) == (0, True, known_to)

    def test_the_machine_may_have_another_speed_by_then(self):
        worker = Drawing(Timing((212.0,) * 9), Timing((200.0,) * 9))
        found = _close_again(run_of(worker), ["a", "b", "c"], [SLOW, LUCKY, UNLUCKY])
        assert fastest_of(found) == 2
        assert found[0].median_us == pytest.approx(112 * 2, rel=0.1)

    def test_a_make_for_which_the_time_was_up_says_nothing(self):
        late = Rejected("timeout", "no time")
        makes = [[LUCKY, UNLUCKY], [UNLUCKY, LUCKY], [SLOW, late]]
        assert [timing.samples for timing in of_makes(whole(makes))] == [10, 10]
        assert of_makes(whole(makes[2:])) == [SLOW, late]

    def test_makes_that_were_timed_count_as_much_as_the_first(self):
        late, again = Rejected("timeout", "no time"), Timing((100.0,) * 9)
        worker = Drawing(again, again, late, late, late, late)
        found = _close_again(run_of(worker), ["a", "b", "c"], [SLOW, LUCKY, UNLUCKY])
        assert [timing.samples for timing in found] == [5, 5 + 9, 5 + 9]

    @pytest.mark.parametrize(
        ("kind", "call_ms", "seconds", "makes"),
        [("cpu", 4, 3.0, 3), ("cpu", 120, 3.0, 2), ("cpu", 900, 3.0, 1), ("cuda", 1, 9.0, 1)],
    )
    def test_slow_ones_are_made_less_often(self, kind, call_ms, seconds, makes):
        assert makes_that_fit(kind, 1e3 * call_ms, seconds) == makes

    def test_no_more_than_four_share_the_time(self):
        timings = [Timing((us,) * 5) for us in (104.0, 100.0, 105.0, 103.0, 101.0, 102.0)]
        assert close(timings, "cpu") == [1, 3, 4, 5]

    def test_one_alone_has_won(self):
        worker = Drawing()
        assert _close_again(run_of(worker), ["a", "b"], [SLOW, LUCKY]) == [SLOW, LUCKY]
        assert worker.asked == []

    def test_without_time_they_stay_as_they_are(self):
        worker = Drawing(Rejected("timeout", "no time"), Rejected("timeout", "no time"))
        found = [LUCKY, UNLUCKY]
        assert _close_again(run_of(worker), ["a", "b"], found) == found
        assert _close_again(run_of(worker, seconds=0.0), ["a", "b"], found) == found
        assert len(worker.asked) == 1

    def test_what_crashes_the_second_time_is_out(self):
        worker = Drawing(LUCKY, Rejected("crash", "an illegal memory access"))
        found = _close_again(run_of(worker), ["a", "b"], [LUCKY, UNLUCKY])
        assert [isinstance(each, Rejected) for each in found] == [False, True]


def fastest_of(timings):
    return min(close(timings, "cpu"), key=lambda i: timings[i].median_us)


@pytest.mark.parametrize(("mode", "joins"), [("infer", True), ("train", False)])
def test_in_training_both_passes_are_compiled_so_there_must_be_twice_the_time(mode, joins):
    worker, run = FakeWorker(), run_of(FakeWorker(), "sm90", seconds=40.0)
    problem = replace(run.problem, mode=mode)
    _race(replace(run, worker=worker, problem=problem), ["a plan"])
    _, routes = worker.raced
    assert ("compile-reduce-overhead" in routes) == joins
    assert "eager" in routes
