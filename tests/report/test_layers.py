from __future__ import annotations

import pytest

from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured, Rejected
from plantune.graph.partition import one_by_one
from plantune.kernels.family import Candidate
from plantune.plans.workload import Workload
from plantune.report.layers import (
    MeasuredStep,
    StepTime,
    by_layer,
    compared,
    layer_of,
    untimed,
)


@pytest.mark.parametrize(
    ("node", "layer"),
    [
        ("stem.1/conv2d", "stem.1"),
        ("layers.0.0/add_2", "layers.0.0"),
        ("d(stem.1/conv2d)/add_2", "stem.1"),
        ("d(d(stem.1/conv2d)/add)/mul", "stem.1"),
        ("x", "x"),
    ],
)
def test_a_node_belongs_to_its_module(node: str, layer: str) -> None:
    assert layer_of(node) == layer


def test_backward_ops_count_for_their_layer() -> None:
    graph = Workload("se_resnet9_fixup", 1, mode="train").graph
    steps = [step for step in one_by_one(graph) if step.phase != "refresh"]
    one = Measured(1.0, 1.0, 1.0, 1, 0.0, 0.0, True)
    layers = by_layer([MeasuredStep(step, Candidate("framework", Attrs()), one) for step in steps])
    assert sum(layer.framework_us or 0.0 for layer in layers) == len(steps)
    forward = {layer_of(step.name) for step in steps if step.phase == "forward"}
    assert {layer.layer for layer in layers if "conv" in layer.layer} <= forward


def test_a_layer_with_an_op_that_has_no_time_has_none() -> None:
    graph = Workload("se_resnet9_fixup", 1).graph
    framework = Candidate("framework", Attrs())
    one, none = Measured(1.0, 1.0, 1.0, 1, 0.0, 0.0, True), Rejected("noisy", "busy")
    timed = [
        MeasuredStep(step, framework, none if step.ops == ("conv2d",) else one)
        for step in one_by_one(graph)
    ]
    times = {layer.layer: layer.framework_us for layer in by_layer(timed)}
    assert times["stem.1"] is None
    assert times["layers.0.0.conv1"] is None
    assert next(iter(times.values())) is not None  # those with a time come first
    reasons = untimed(timed)
    assert reasons["stem.1/conv2d with framework"] == "could not be timed: busy"


def test_sums_are_over_steps_with_both_times() -> None:
    def step(framework_us: float | None, plan_us: float | None) -> StepTime:
        return StepTime("a", ("a",), ("relu",), "framework", framework_us, plan_us)

    steps = [step(10.0, 4.0), step(None, 4.0), step(10.0, None), step(5.0, 5.0)]
    assert compared(steps) == {
        "framework_us": 15.0,
        "plan_us": 9.0,
        "compared_steps": 2,
    }
