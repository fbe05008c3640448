from __future__ import annotations

import pytest

from plantune.graph.partition import one_by_one
from plantune.kernels.family import Candidate
from plantune.problem import Problem
from plantune.report.layers import by_layer, layer_of, total_us
from plantune.values import Attrs


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
    graph = Problem("se_resnet9_fixup", 1, mode="train").graph
    steps = [step for step in one_by_one(graph) if step.phase != "refresh"]
    timed = [(step, Candidate("framework", Attrs()), 1.0) for step in steps]
    layers = by_layer(timed)
    assert sum(layer.framework_us for layer in layers) == total_us(timed) == len(steps)
    forward = {layer_of(step.name) for step in steps if step.phase == "forward"}
    assert {layer.layer for layer in layers if "conv" in layer.layer} <= forward
