"""Levels of fusion: what each may fuse, what a pass of it costs, how that is told."""

from __future__ import annotations

from collections import Counter

import pytest

from plantune.base.outcome import Rejected
from plantune.measure.programs import PassCost, launches, pass_cost
from plantune.measure.timing import Timing
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import COMPILED, hand_plan
from plantune.plans.workload import Workload
from plantune.report.levels import level_row, levels, levels_table
from plantune.space.search_space import load_search_space

SPACE = load_search_space("cpu")
CONV, NORM, SUM, RELU = "conv2d", "add_channel", "add", "relu"


@pytest.fixture(scope="module")
def problem():
    return Workload("resnet18", 1)


@pytest.fixture(scope="module")
def found(problem):
    plan = hand_plan(problem.graph, SPACE, network="resnet18", without=COMPILED)
    return {level.name: level for level in levels(problem, plan)}


def steps_of(level):
    """How often each run of ops is a step of a pass."""
    steps = check_plan(level.plan, level.graph, SPACE).of_pass
    return Counter(chosen.step.ops for chosen in steps)


def test_nothing_is_fused_at_first(found):
    steps = steps_of(found["none"])
    assert [ops for ops in steps if len(ops) > 1] == [("matmul", "add_channel")]  # one call
    assert steps["mul_channel",] == steps[NORM,] == 20
    families = {choice.candidate.family for choice in found["none"].plan.choices}
    assert families <= {"framework", "view"}


@pytest.mark.parametrize(
    ("name", "fused", "alone"),
    [
        ("conv+bn", {(CONV, NORM): 20}, {SUM: 8, RELU: 17}),
        ("conv+bn+relu", {(CONV, NORM): 11, (CONV, NORM, RELU): 9}, {SUM: 8, RELU: 8}),
        (
            "conv+bn+add+relu",
            {(CONV, NORM): 3, (CONV, NORM, RELU): 9, (CONV, NORM, SUM, RELU): 8},
            {SUM: 0, RELU: 0},
        ),
    ],
)
def test_each_level_takes_more_after_a_convolution(found, name, fused, alone):
    steps = steps_of(found[name])
    assert {ops: count for ops, count in steps.items() if ops[0] == CONV} == fused
    assert {op: steps[op,] for op in alone} == alone


def test_fewer_kernels_from_level_to_level(found):
    counts = [launches(check_plan(level.plan, level.graph, SPACE)) for level in found.values()]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[1] >= 20
    assert counts[2] - counts[3] == 16


def test_the_cost_of_a_pass_is_measured(found):
    cost = pass_cost(found["plan"].graph, found["plan"].plan, runs=3)
    assert cost.cpu.samples == 3
    assert cost.cpu.median_us > 1000
    assert cost.gpu is None
    assert cost.kernels == launches(check_plan(found["plan"].plan, found["plan"].graph, SPACE))


@pytest.mark.gpu
def test_the_cost_of_a_pass_on_a_gpu():
    problem = Workload("resnet18", 2, dtype="float16", arch="sm90")
    space = load_search_space("sm90")
    plan = hand_plan(problem.graph, space, network="resnet18")
    costs = [pass_cost(level.graph, level.plan, 5) for level in levels(problem, plan)]
    kernels = [cost.kernels for cost in costs]
    assert kernels == sorted(kernels, reverse=True)
    assert 20 <= kernels[-1] <= 40
    assert all(cost.gpu is not None and cost.gpu.median_us > 0 for cost in costs)


def test_rows_tell_medians_and_what_failed(found):
    level = found["conv+bn"]
    cost = PassCost(Timing((3.0, 1.0, 2.0)), Timing((30.0, 10.0, 20.0)), 7)
    slow = level_row(found["none"], PassCost(Timing((5.0,)), Timing((80.0,)), 90))
    row = level_row(level, cost)
    assert row == {"level": "conv+bn", "cpu_us": 2.0, "gpu_us": 20.0, "kernels": 7, "runs": 3}
    failed = level_row(found["plan"], Rejected("memory", "out of memory"))
    assert failed["cpu_us"] is None
    lines = levels_table([slow, row, failed]).splitlines()
    assert lines[2].split() == ["conv+bn", "2", "us", "20", "us", "7", "0.250"]
    assert "out of memory" in lines[3]
