"""What is known to be slower is not ranked, whatever few rounds on a busy machine would say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune.base.outcome import Measured
from plantune.devices.machine import cpu_environment
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.measure.racing.race import Race
from plantune.measure.timing import Timing, ratio_interval
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.guess import framework_plan, hand_plan
from plantune.plans.planner.candidates import candidates_of
from plantune.plans.problem import Problem
from plantune.search.budget import Budget
from plantune.search.contenders.dearer import without_dearer
from plantune.search.results import SearchOptions, silent
from plantune.search.search import Search
from plantune.search.sought import Sought
from plantune.search.step_search import StepSearch

FUSED_US, APART_US = 186.0, 248.0


class Net(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c = nn.Linear(8 * 64, 10)

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))).flatten(1))


@pytest.fixture(scope="module")
def net():
    return extract(Net().eval(), TensorType((16, 3, 8, 8)))


def table_us(step, candidate):
    """A convolution with bias and ReLU: together, or by calls of the framework's."""
    if step.ops[0] == "conv2d" and step.ops[-1] == "relu":
        return FUSED_US if candidate.family == "onednn_conv" else 2 * FUSED_US
    if candidate.family == "view":
        return 0.1
    parts = {"conv2d": 150.0, "add_channel": 49.0, "relu": 49.0, "matmul": 20.0, "reshape": 9.0}
    return sum(parts[op] for op in step.ops)


class Lucky:
    """A worker with that table, for whose clock the plan of most steps is the fastest as a whole:
    it ran while nobody else did.
    """

    threads = limits = environment = None

    def __init__(self):
        self.ranked = []

    def start(self, cut_at=None): ...

    def check_and_time(self, step, candidate, arch, effort=None, seeds=(0, 1)):
        us = table_us(step, candidate)
        return Measured(us, us, us, 9, 1e-7, 1e-6, True)

    def time_programs(self, graph, plans, effort, seed=0):
        self.ranked += plans
        return [Timing((1000.0 / len(plan.choices),) * 8) for plan in plans]

    def rooflines(self, steps, arch):
        return [1.0] * len(steps)

    def race(self, raced, plan, routes, effort, seed):
        timings = {name: Timing((us,) * 9) for name, us in (("plantune", 2.0), ("eager", 3.0))}
        return Race(timings, {}, "eager", ratio_interval(timings["plantune"], timings["eager"]))


def steps_us(plan, graph, space):
    return sum(table_us(item.step, item.candidate) for item in candidates_of(plan, graph, space))


@pytest.mark.usefixtures("as_with_a_compiler")
@pytest.mark.parametrize("seed", range(3))
def test_a_search_neither_ranks_nor_ends_with_steps_that_are_known_to_take_longer(
    net, space, tmp_path, monkeypatch, seed
):
    for reader in ("plans.database.stored", "search.contenders.known"):
        monkeypatch.setattr(f"plantune.{reader}.data_folder", lambda name: tmp_path / name)
    problem, worker = Problem.of(net, "cpu", "net"), Lucky()
    with PlanDatabase.open(tmp_path / "plans.db") as database:
        options = SearchOptions(60.0, seed=seed)
        search = Search(Sought(net, problem), options, database, cpu_environment())
        plan = search.run(worker).plan
    best_us = 2 * FUSED_US + 69.0 + 0.1
    assert worker.ranked
    assert all(steps_us(each, net, space) <= 1.1 * best_us for each in worker.ranked)
    assert [choice.nodes for choice in plan.choices][:2] == [
        ("a/conv2d", "a/add_channel", "relu"),
        ("b/conv2d", "b/add_channel", "relu_2"),
    ]


class Table:
    """Measures by the table, and keeps what was asked for."""

    def __init__(self, without=()):
        self.asked, self.without = [], without

    def measure(self, step, candidate, limit_us):
        self.asked.append(candidate)
        us = table_us(step, candidate)
        return Measured(us, us, us, 9, 1e-7, 1e-6, True)


@pytest.fixture
def steps(net, space, store):
    return StepSearch(net, space, Table(), store)


def learn(steps, plan, graph, space):
    """Has the steps of a plan measured."""
    steps.begin_with(plan, Budget(600.0), silent)
    assert all(steps.costs.knows(item) for item in candidates_of(plan, graph, space))


def onednn(net, space):
    """All that oneDNN fuses, without what is compiled."""
    compiled = ("winograd", "patch_conv", "pooled_conv", "direct_conv", "direct_linear")
    return hand_plan(net, space, network="net", without=compiled)


def test_an_estimate_does_not_displace_what_was_measured(net, space, steps):
    """The framework's calls are guessed to take a few microseconds."""
    learn(steps, onednn(net, space), net, space)
    for _, cover in steps.covers(4):
        assert not any(map(steps.costs.unsure, cover))
    us, cover = steps.covers(1)[0]
    assert ("a/conv2d", "a/add_channel", "relu") in {item.nodes for item in cover}
    assert us >= 2 * FUSED_US


def test_what_nothing_else_covers_is_estimated(net, space, steps):
    learn(steps, framework_plan(net, space, network="net"), net, space)
    known = steps.costs.outcomes
    for key in [key for key in known if key[1].family == "framework"][:1]:
        del known[key]
    (us, cover), *_ = steps.covers(1)
    assert {name for item in cover for name in item.nodes} == {node.name for node in net.nodes}
    assert us < 1e6


def test_a_plan_whose_measured_steps_take_longer_is_left_out(net, space, steps):
    plain, by_hand = framework_plan(net, space, network="net"), onednn(net, space)
    learn(steps, plain, net, space)
    learn(steps, by_hand, net, space)
    assert without_dearer([plain, by_hand], net, space, steps) == [by_hand]


def test_of_what_was_not_measured_nobody_knows(net, space, steps):
    plain, by_hand = framework_plan(net, space, network="net"), onednn(net, space)
    learn(steps, by_hand, net, space)
    assert without_dearer([plain, by_hand], net, space, steps) == [plain, by_hand]


def test_what_is_common_to_both_does_not_hide_the_difference(net, space, steps):
    """One convolution in three steps, all else as in the best cover: 1.14 of the whole."""
    plain, by_hand = framework_plan(net, space, network="net"), onednn(net, space)
    learn(steps, plain, net, space)
    learn(steps, by_hand, net, space)
    apart = [choice for choice in plain.choices if choice.nodes[0] in ("a/conv2d", "relu")]
    rest = [choice for choice in by_hand.choices if choice.nodes[0] != "a/conv2d"]
    mixed = replace(by_hand, choices=(*apart, *rest))
    assert without_dearer([mixed], net, space, steps) == []


def test_a_plan_with_a_kernel_that_was_found_wrong_is_left_out(net, space, store):
    from plantune.base.outcome import Rejected

    class Wrong(Table):
        def measure(self, step, candidate, limit_us):
            if candidate.family == "gemm":
                return Rejected("numerics", "it is wrong")
            return super().measure(step, candidate, limit_us)

    steps, by_hand = StepSearch(net, space, Wrong(), store), onednn(net, space)
    assert "gemm" in {choice.candidate.family for choice in by_hand.choices}
    learn(steps, by_hand, net, space)
    learn(steps, framework_plan(net, space, network="net"), net, space)
    assert without_dearer([by_hand], net, space, steps) == []
