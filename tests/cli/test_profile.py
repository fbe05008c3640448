"""profile: the framework's time by layer, and what the plan removed of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plantune.base.outcome import Outcome, Rejected
from plantune.devices.machine import cpu_environment
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.measure.programs import PassCost
from plantune.measure.timing import Timing
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.plan import Plan
from plantune.plans.workload import Workload
from plantune.report.steps import plan_steps

from .conftest import FakeWorker, Run, measured, object_of


@pytest.fixture(autouse=True)
def stored(store: Callable[..., int], fused_plan: Plan, worker: FakeWorker) -> int:
    """10 us for each call of the framework, 4 us for each other step."""

    def outcome(step: Step, candidate: Candidate) -> Outcome:
        one = len(step.nodes) == 1 or candidate.family == "framework"
        return measured(10.0 if one else 4.0)

    worker.outcomes = outcome
    return store(fused_plan)


def test_layers_and_steps_add_up(run: Run, problem: Workload, fused_plan: Plan) -> None:
    result = run("profile", "--batch", 1, "--json")
    assert result.exit_code == 0
    data = object_of(result)
    assert sum(row["framework_us"] for row in data["layers"]) == data["framework_us"]
    assert sum(row["framework_us"] for row in data["steps"]) == data["framework_us"]
    assert sum(row["plan_us"] for row in data["steps"]) == data["plan_us"]
    fused = [row for row in data["steps"] if len(row["ops"]) > 1]
    assert fused
    for row in fused:  # a convolution or a product adds its bias itself
        pairs = list(zip(row["ops"], row["ops"][1:], strict=False))
        biased = sum(
            pair in (("conv2d", "add_channel"), ("matmul", "add_channel")) for pair in pairs
        )
        assert row["removed_us"] == 10.0 * (len(row["ops"]) - biased) - 4.0
    assert data["steps"][0]["removed_us"] == max(row["removed_us"] for row in data["steps"])
    assert (data["framework_whole_us"], data["plan_whole_us"]) == pytest.approx((4008, 2004))
    assert "layers.0.0.conv1" in run("profile", "--batch", 1).stdout


def test_what_is_stored_is_not_measured_again_but_when_asked(
    run: Run, problem: Workload, fused_plan: Plan
) -> None:
    steps = plan_steps(fused_plan, problem.graph)
    step, candidate = next(each for each in steps if len(each[0].nodes) > 1)
    with PlanDatabase.open() as database:
        database.put_trial(step.signature, candidate, cpu_environment(), measured(7.0))

    def plan_us(*options: str) -> float:
        rows = object_of(run("profile", 1, "--json", *options))["steps"]
        return next(float(row["plan_us"]) for row in rows if row["step"] == step.name)

    assert plan_us() == 7.0
    assert plan_us("--fresh") == 4.0


def test_a_step_without_a_time_is_left_open(run: Run, worker: FakeWorker) -> None:
    worker.outcomes = lambda step, candidate: Rejected("noisy", "busy")
    data = object_of(run("profile", 1, "--json"))
    assert all(row["plan_us"] is None and row["removed_us"] is None for row in data["steps"])
    assert all(row["framework_us"] is None for row in data["layers"])
    assert (data["compared_steps"], data["framework_us"], data["plan_us"]) == (0, 0, 0)
    assert all(reason == "could not be timed: busy" for reason in data["not_timed"].values())


def test_sums_are_over_what_both_sides_have(run: Run, worker: FakeWorker) -> None:
    """A layer with an op that could not be timed has no time, not that of its other ops."""

    def outcome(step: Step, candidate: Candidate) -> Outcome:
        if step.ops == ("conv2d",):
            return Rejected("noisy", "busy")
        return measured(10.0 if len(step.nodes) == 1 else 4.0)

    worker.outcomes = outcome
    data = object_of(run("profile", 1, "--json"))
    both = [row for row in data["steps"] if None not in (row["framework_us"], row["plan_us"])]
    assert 0 < len(both) == data["compared_steps"] < len(data["steps"])
    assert data["framework_us"] == sum(row["framework_us"] for row in both)
    assert data["plan_us"] == sum(row["plan_us"] for row in both)
    result = run("profile", 1)
    assert f"sum of the {len(both)} of {len(data['steps'])} steps timed: " in result.stdout
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("stem.1  ")]
    assert row.split()[1:3] == ["-", "-"]
    assert "not timed: stem.1/conv2d with framework" in result.stdout
    assert "timing step 1 of" in result.stderr


def test_levels_of_fusion(run: Run, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(graph: object, plan: Plan, runs: int) -> PassCost:
        samples = tuple(float(len(plan.choices)) for _ in range(runs))
        return PassCost(Timing(samples), None, len(plan.choices))

    monkeypatch.setattr(worker, "pass_cost", cost, raising=False)
    result = run("profile", "--batch", 1, "--levels", "--json")
    rows = object_of(result)["levels"]
    names = ["none", "conv+bn", "conv+bn+relu", "conv+bn+add+relu", "plan"]
    assert [row["level"] for row in rows] == names
    assert all(row["runs"] >= 20 for row in rows)
    assert rows[0]["cpu_us"] > rows[1]["cpu_us"] >= rows[2]["cpu_us"]
    assert "conv+bn+add+relu" in run("profile", "--batch", 1, "--levels").stdout
