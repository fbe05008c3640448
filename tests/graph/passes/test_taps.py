"""Max pools whose winners are kept as bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.runtime.proof.cases import evaluated


def pools(graph):
    return [node.op for node in graph.nodes if "max_pool2d" in node.op]


def trained(module, dtype="float16", shape=(2, 8, 9, 7)):
    return differentiate(extract(module, TensorType(shape, dtype)), ["x"])


def test_in_16_bits_a_pool_keeps_a_byte_for_each_window():
    graph = trained(nn.MaxPool2d(3, 2, 1))
    assert pools(graph) == ["max_pool2d_taps", "max_pool2d_taps_grad"]
    (kept,) = graph.saved
    assert graph.types[kept] == TensorType((2, 8, 5, 4), "uint8")


@pytest.mark.parametrize(
    ("module", "dtype", "shape"),
    [
        (nn.MaxPool2d(3, 2, 1), "float32", (2, 8, 9, 7)),
        (nn.MaxPool2d(17), "float16", (1, 1, 17, 17)),
    ],
)
def test_others_keep_places(module, dtype, shape):
    assert pools(trained(module, dtype, shape)) == ["max_pool2d", "max_pool2d_grad"]


def test_without_a_gradient_nothing_changes():
    graph = extract(nn.MaxPool2d(2), TensorType((2, 8, 9, 7), "float16"))
    assert pools(graph) == ["max_pool2d"]


@pytest.mark.parametrize(
    "module",
    [nn.MaxPool2d(3, 2, 1), nn.MaxPool2d((2, 5), (1, 3), (1, 2)), nn.MaxPool2d(4, 3)],
)
def test_the_gradient_is_torchs(module):
    """With equal values in windows."""
    torch.manual_seed(0)
    graph = trained(module, "bfloat16")
    x = torch.randint(-2, 3, (2, 8, 9, 7)).bfloat16().requires_grad_()
    y = module(x)
    dy = torch.randint(-4, 5, y.shape).bfloat16()
    y.backward(dy)
    names = [name for name, _ in (*graph.inputs, *graph.output_gradients)]
    known = evaluated(graph, dict(zip(names, (x.detach(), dy), strict=True)))
    assert torch.equal(known[graph.outputs[0]], y.detach())
    assert torch.equal(known[dict(graph.gradients)["x"]], x.grad)
