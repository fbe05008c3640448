"""On a GPU a search measures while the kernels of the plans that it begins from are compiled."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from plantune.base.outcome import Measured
from plantune.devices.machine import cpu_environment
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels import registry
from plantune.measure.racing.race import Race
from plantune.measure.timing import Timing, ratio_interval
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.planner.candidates import step_candidates
from plantune.plans.problem import Problem
from plantune.search import listing, start
from plantune.search.builds import Builds
from plantune.search.results import SearchOptions
from plantune.search.search import Search
from plantune.search.sought import Sought
from plantune.search.step_search import StepSearch
from plantune.space.search_space import load_search_space


class Twice(torch.nn.Module):
    """Two equal convolutions."""

    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            torch.nn.Conv2d(64, 64, 3, 1, 1, bias=False) for _ in range(2)
        )

    def forward(self, x):
        for conv in self.convs:
            x = torch.relu(conv(x))
        return x


@pytest.fixture(scope="module")
def twice():
    return extract(Twice().eval().half(), TensorType((8, 64, 8, 8), "float16"), fold=False)


class Worker:
    """Notes what it is asked for."""

    threads = limits = environment = None

    def __init__(self, seen):
        self.seen = seen

    def start(self, until=None):
        pass

    def check_and_time(self, step, candidate, *arguments, **options):
        self.seen.append("a candidate")
        return Measured(10.0, 10.0, 10.0, 9, 0.0, 1.0, True)

    def time_programs(self, graph, plans, effort, seed=0):
        self.seen.append("plans")
        return [Timing((50.0,) * 8) for _ in plans]

    def rooflines(self, steps, arch):
        return [1.0] * len(steps)

    def race(self, raced, plan, routes, effort, seed):
        ours, theirs = Timing((50.0,) * 8), Timing((100.0,) * 8)
        timings = {"plantune": ours, "eager": theirs}
        return Race(timings, {}, "eager", ratio_interval(ours, theirs))


def test_no_candidate_waits_for_the_kernels_of_the_guess(twice, monkeypatch):
    """A ResNet-50 in training has 102 of them."""
    seen: list[str] = []
    measured, begun = threading.Event(), threading.Event()
    worker = Worker(seen)

    def build(candidate):
        begun.set()
        assert measured.wait(30)
        seen.append("a kernel")

    def check_and_time(*arguments, **options):
        measured.set()
        return Worker.check_and_time(worker, *arguments)

    def listed(*arguments, **options):
        assert begun.wait(30)  # what the guess needs is compiled while candidates are listed
        return StepSearch(*arguments, **options)

    @contextmanager
    def builds_for(arch, worker):
        builds = Builds(build, lambda c: c.key if c.candidate.family != "framework" else None, 2)
        yield builds
        builds.close()

    monkeypatch.setattr(start, "builds_for", builds_for)
    monkeypatch.setattr(listing, "StepSearch", listed)
    monkeypatch.setattr(StepSearch, "run", lambda steps, budget, report: None)
    monkeypatch.setattr(worker, "check_and_time", check_and_time)
    with PlanDatabase.in_memory() as database:
        problem = Problem.of(twice, "sm90", "twice")
        options = SearchOptions(60.0, shipped=False)
        result = Search(Sought(twice, problem), options, database, cpu_environment()).run(worker)
    assert seen[0] == "a candidate"
    assert "a kernel" in seen[: seen.index("plans")]
    assert {"preparing", "measuring", "ranking", "racing"} <= set(result.stages_s)


def test_candidates_of_equal_steps_are_listed_once(twice, monkeypatch):
    asked = []
    family = registry.family_named("hopper_conv")
    why_not = type(family).why_not_config
    monkeypatch.setattr(
        type(family), "why_not_config", lambda *given: asked.append(given) or why_not(*given)
    )
    registry._remembered.cache_clear()
    space = load_search_space("sm90")
    first = [c for c in step_candidates(twice, space) if c.candidate.family == "hopper_conv"]
    steps = {c.step.signature: c.nodes for c in first}
    assert len({c.nodes for c in first}) > len(steps)
    once = len(asked)
    assert [c.key for c in step_candidates(twice, space) if c in first] == [c.key for c in first]
    assert len(asked) == once == len(steps) * len(space.configs("hopper_conv"))
    estimates = {c.key: c.estimate_us for c in first if c.twin is None}
    assert all(c.estimate_us == estimates[c.key] for c in first)


@pytest.mark.parametrize(("mode", "left_s"), [("infer", 85.0), ("train", 72.0)])
def test_a_race_in_training_has_time_for_both_passes_of_all_ways(twice, mode, left_s):
    with PlanDatabase.in_memory() as database:
        problem = replace(Problem.of(twice, "sm90", "twice"), mode=mode)
        sought = Sought(twice, problem)
        search = Search(sought, SearchOptions(100.0), database, cpu_environment())
    search.budget.race_s = start.race_s(sought, 10.0)
    assert search.budget.left_for("ranking") == pytest.approx(left_s, abs=1)
