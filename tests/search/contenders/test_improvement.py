"""Runners-up that win in the whole, with times that the plans themselves say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from plantune.base.outcome import Measured, Rejected
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.measure.timing import Timing
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan
from plantune.plans.planner.candidates import StepCandidate, step_candidates
from plantune.search.contenders.improvement import branched, improved, swaps
from plantune.search.policy import NEAR
from plantune.space.search_space import load_search_space


def measured(us):
    return Measured(us, us, us, 9, 0.0, 1.0, True)


@pytest.fixture
def plan(graph, space):
    return framework_plan(graph, space, network="small")


@pytest.fixture
def outcomes(graph, space):
    """The framework's convolutions take 100 us alone, oneDNN's nearly the same or far more."""
    found = {}
    for item in step_candidates(graph, space):
        config = item.candidate.config
        if item.candidate.family == "framework":
            found[item.key] = measured(100.0 if config["layout"] == "nchw" else 105.0)
        elif item.candidate.family == "onednn_conv":
            near = config["layout"] == "nhwc" and config["prepack"]
            found[item.key] = measured(101.0 if near else 100.0 * NEAR + 1)
    return found


def timer(cost):
    """Times each plan by the sum of its choices' costs."""

    def time_plans(plans):
        return [timing(sum(map(cost, plan.choices))) for plan in plans]

    return time_plans


def timing(us):
    return Timing(tuple(us * (1 + 0.001 * (i % 3)) for i in range(12)))


def families(plan):
    return [choice.candidate.family for choice in plan.choices]


def test_runners_up_are_near_the_best_and_the_slowest_steps_come_first(
    plan, graph, space, outcomes
):
    found = swaps(plan, graph, space, outcomes)
    steps = {step.name: step for step in check_plan(plan, graph, space).partition}
    times = []
    for swap in found:
        taken = [outcomes[StepCandidate(steps[name], c).key].median_us for name, c in swap.items()]
        assert max(taken) <= 100.0 * NEAR
        for name, candidate in swap.items():
            assert candidate not in [c.candidate for c in plan.choices if c.nodes[0] == name]
        times.append(sum(taken))
    assert times == sorted(times, reverse=True)
    assert any(c.family == "onednn_conv" for swap in found for c in swap.values())


def test_what_wins_in_the_whole_is_taken_together(plan, graph, space, outcomes):
    found = swaps(plan, graph, space, outcomes)
    better = improved(
        plan,
        graph,
        space,
        found,
        timer(lambda c: 50.0 if c.candidate.family != "framework" else 100.0),
    )
    assert families(better).count("onednn_conv") == 2
    check_plan(better, graph, space)


def test_a_tie_keeps_the_plan(plan, graph, space, outcomes):
    found = swaps(plan, graph, space, outcomes)
    assert improved(plan, graph, space, found, timer(lambda choice: 100.0)) is plan


def test_what_is_slower_together_is_not_taken(plan, graph, space, outcomes):
    def time_plans(plans):
        changed = [families(each).count("onednn_conv") for each in plans]
        return [timing({0: 100.0, 1: 90.0}.get(count, 120.0)) for count in changed]

    assert improved(plan, graph, space, swaps(plan, graph, space, outcomes), time_plans) is plan


def test_plans_that_do_not_run_lose(plan, graph, space, outcomes):
    def time_plans(plans):
        return [timing(100.0), *(Rejected("crash", "it died") for _ in plans[1:])]

    assert improved(plan, graph, space, swaps(plan, graph, space, outcomes), time_plans) is plan


class Beside(nn.Module):
    """What is pooled waits for the two ReLUs in a row."""

    def forward(self, x):
        return nn.functional.avg_pool2d(x.relu(), 3, 1, 1) + x.relu().sigmoid().relu()


class TestBranches:
    @pytest.fixture
    def gpu(self):
        return load_search_space("sm90")

    @pytest.fixture
    def forking(self, gpu):
        graph = extract(Beside(), TensorType((2, 4, 8, 8), "float16"))
        return framework_plan(graph, gpu, network="small"), graph

    def time(self, with_branches):
        return lambda plans: [timing(with_branches if p.branches else 100.0) for p in plans]

    def test_they_are_taken_where_they_win(self, forking, gpu):
        plan, graph = forking
        assert branched(plan, graph, gpu, self.time(95.0)) == replace(plan, branches=True)

    @pytest.mark.parametrize("us", [100.0, 110.0])
    def test_a_tie_and_a_loss_keep_the_line(self, forking, gpu, us):
        plan, graph = forking
        assert branched(plan, graph, gpu, self.time(us)) is plan

    def test_a_capture_that_fails_keeps_the_line(self, forking, gpu):
        plan, graph = forking
        timings = [timing(100.0), Rejected("crash", "it died")]
        assert branched(plan, graph, gpu, lambda plans: timings) is plan

    def test_what_has_none_is_not_timed(self, gpu, plan, graph, space):
        half = extract(nn.ReLU(), TensorType((2, 4, 8, 8), "float16"))
        line = framework_plan(half, gpu, network="relu")
        assert branched(line, half, gpu, None) is line
        assert branched(plan, graph, space, None) is plan  # the CPU runs one step after another
