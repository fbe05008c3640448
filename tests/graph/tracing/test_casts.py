"""Dtypes that meet in a graph: what torch makes of them, how gradients come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plantune.graph.graph import Graph
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.step import Step, make_step
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.layers import SpaceToDepth

SHAPE = (2, 3, 8, 8)
IMAGES = torch.arange(2 * 3 * 64).view(SHAPE).to(torch.uint8)
DTYPES = (torch.uint8, torch.float32, torch.float16)


def stem(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(SpaceToDepth(4), nn.Conv2d(48, 8, 1, bias=False), nn.ReLU()).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.net(x.half() * (1 / 255)),
        lambda m, x: m.net(x.to(torch.float16) * m.factor),
        lambda m, x: m.net(x.to(m.net[1].weight.dtype) - 3),
        lambda m, x: m.net(((x.float() - m.mean) / m.deviation).half()).float(),
        lambda m, x: m.net(x.to(m.factor) / m.factor),
        lambda m, x: m.net((x * 0.5).half()),
        lambda m, x: m.net((x / 2).half()),
        lambda m, x: m.net((0.5 - x).half()),
        lambda m, x: m.net((x + m.mean).half()),
    ],
)
def test_images_of_another_dtype_than_the_network(
    forward: Callable[[Any, Tensor], Tensor],
    dtype: torch.dtype,
    calls: Any,
    extracts: Callable[..., Graph],
) -> None:
    state = {
        "factor": torch.tensor(1 / 8).half(),
        "mean": torch.rand(3, 1, 1),
        "deviation": torch.rand(1, 3, 1, 1) + 0.5,
    }
    graph = extracts(calls(forward, net=stem(torch.float16), **state), IMAGES.to(dtype))
    convolution = next(node for node in graph.nodes if node.op == "conv2d")
    assert convolution.types[0].dtype == "float16"


def dtypes_of(graph: Graph) -> list[str]:
    return [graph.types[value].dtype for _, value in graph.gradients]


def test_gradients_come_back_in_the_dtype_of_their_source(calls: Any) -> None:
    module = calls(lambda m, x: (x.float() * m.w.float()).half(), w=nn.Parameter(torch.ones(3)))
    module.w.data = module.w.data.bfloat16()
    graph = extract(module, TensorType((2, 3), "float16"))
    assert dtypes_of(differentiate(graph, ["x", "w"])) == ["bfloat16", "float16"]


def test_images_of_integers_have_no_gradient(calls: Any) -> None:
    module = calls(lambda m, x: x.float() * m.w, w=nn.Parameter(torch.ones(3)))
    graph = differentiate(extract(module, TensorType((2, 3), "uint8")), ["x", "w"])
    assert [name for name, _ in graph.gradients] == ["w"]


def test_a_graph_with_casts_comes_back_from_json(calls: Any) -> None:
    graph = extract(calls(lambda m, x: x.half() / 255), TensorType((2, 3), "uint8"))
    assert [node.op for node in graph.nodes] == ["cast", "affine"]
    assert Graph.from_json(graph.to_json()) == graph
    wide = extract(calls(lambda m, x: x.float() / 255), TensorType((2, 3), "uint8"))
    assert wide.digest != graph.digest


def test_a_reference_rounds_at_no_cast(calls: Any) -> None:
    graph = extract(calls(lambda m, x: x.half() * 0.1), TensorType((2, 3), "uint8"))
    step: Step = make_step(graph, [node.name for node in graph.nodes])
    x = torch.randint(256, (2, 3), dtype=torch.uint8)
    (name,) = graph.outputs
    assert step.evaluate({"x": x})[name].dtype == torch.float16
    exact = step.evaluate({"x": x}, torch.float64)[name]
    assert torch.equal(exact, x.double() * 0.1)
