"""What the best plans race against, and what comes of those that fail."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from plantune.errors import CannotJudge, NoViableCandidate, OutOfTime
from plantune.search.contenders.racing import Failed, _race, race_first
from plantune.search.sought import Sought

from .runs import FakeWorker, run_of


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
    _race(replace(run, sought=Sought(graph, run.problem)), SimpleNamespace(arch="sm90"))
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


@pytest.mark.parametrize(("mode", "joins"), [("infer", True), ("train", False)])
def test_in_training_both_passes_are_compiled_so_there_must_be_twice_the_time(mode, joins):
    worker, run = FakeWorker(), run_of(FakeWorker(), "sm90", seconds=40.0)
    problem = replace(run.problem, mode=mode)
    sought = replace(run.sought, problem=problem)
    _race(replace(run, worker=worker, sought=sought), ["a plan"])
    _, routes = worker.raced
    assert ("compile-reduce-overhead" in routes) == joins
    assert "eager" in routes
