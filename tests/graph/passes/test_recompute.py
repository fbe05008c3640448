"""What the backward pass computes anew instead of reading what the forward pass kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from plantune import optimize
from plantune.graph.fusions import fusions_named, groups_from
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.extract import extract, extract_with_outputs
from plantune.graph.types import TensorType
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.runtime.proof.cases import evaluated

IMAGE = TensorType((2, 8, 6, 6))


class Scaled(nn.Module):
    """A convolution with a scale and a shift, which `end` reads."""

    def __init__(self, end):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.conv(x) * self.scale + self.shift)


def anew(graph):
    """What the backward pass computes for itself."""
    return [node.op for node in graph.nodes if node.name.endswith("/again")]


def kept_ops(graph):
    makers = (graph.producers.get(value) for value in graph.saved)
    return sorted(maker.op for maker in makers if maker is not None)


def test_arithmetic_on_a_kept_value_is_computed_anew():
    """The scale's gradient keeps the convolution; its scaled result is not kept beside it."""
    graph = differentiate(extract(Scaled(lambda u: u * u.mean((2, 3), keepdim=True)), IMAGE))
    assert kept_ops(graph) == ["conv2d", "mean"]
    assert anew(graph) == ["mul", "add"]


def test_each_value_is_computed_anew_once_before_its_first_reader():
    graph = differentiate(extract(Scaled(lambda u: u * u.sigmoid() * u), IMAGE))
    assert anew(graph) == ["mul", "add"]
    assert "conv2d" in kept_ops(graph)
    assert "add" not in kept_ops(graph)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (nn.Conv2d(8, 8, 1, bias=False), "the weight's gradient would read it from memory"),
        (nn.MaxPool2d(2), "nobody reads it"),
    ],
)
def test_what_other_kernels_read_is_kept(end, why):
    graph = differentiate(extract(Scaled(end), IMAGE))
    assert not anew(graph), why


def test_what_follows_from_nothing_that_is_kept_is_kept():
    """Keeping the convolution's result instead would save nothing."""

    class Shifted(Scaled):
        def forward(self, x):
            u = self.conv(x) + self.shift
            return u * u

    graph = differentiate(extract(Shifted(None), IMAGE))
    assert kept_ops(graph) == ["add"]


def test_an_input_is_not_read_where_eager_kept_what_followed_from_it():
    """Its owner may overwrite it between both passes."""
    graph = differentiate(extract(SEResNet9Fixup(3, base_planes=16), TensorType((2, 3, 64, 64))))
    assert "space_to_depth" in kept_ops(graph)
    assert not {name for name, _ in graph.inputs} & {*graph.saved}


def test_gradients_stay_what_they_are():
    module = SEResNet9Fixup(3, base_planes=16)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.1)
    x = torch.randn(2, 3, 64, 64)
    y = module(x)
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(y, list(module.parameters()), dy)
    tuned = optimize(module, x, mode="train")
    got = torch.autograd.grad(tuned(x), list(tuned.parameters()), dy)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_torch_widens_is_kept_as_it_was():
    """A convolution of 16 bits whose result is combined with float32 scalars."""
    arguments = Arguments((IMAGE,), autocast=("cuda", torch.float16))
    module = Scaled(lambda u: u * u.mean((2, 3), keepdim=True))
    graph = differentiate(extract_with_outputs(module, arguments)[0])
    kept = {
        graph.producers[v].op: graph.types[v].dtype for v in graph.saved if v in graph.producers
    }
    assert kept["conv2d"] == "float16"
    assert "cast" not in {op for op, dtype in kept.items() if dtype == "float32"}
    assert anew(graph) == ["cast", "mul", "add"]


class Normed(nn.Module):
    """A convolution and its batch norm, which `end` reads."""

    def __init__(self, end, dtype=torch.float16):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.end = end
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.norm(self.conv(x)))


def test_a_norms_result_is_made_again_for_the_gradient_of_an_activation():
    """Its own gradient reads the convolution anyway, so nothing else is kept."""
    image = TensorType((2, 8, 6, 6), "float16")
    graph = differentiate(extract(Normed(nn.GELU()), image))
    assert anew(graph) == ["batch_norm_again"]
    assert kept_ops(graph) == ["batch_norm", "batch_norm", "conv2d"]  # its statistics
    (node,) = (node for node in graph.nodes if node.op == "gelu_grad")
    group = max(groups_from(graph, node, *fusions_named("batch_norm_grad")), key=len)
    by_name = {node.name: node.op for node in graph.nodes}
    assert [by_name[n] for n in group] == ["batch_norm_again", "gelu_grad", "batch_norm_grad"]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Normed(nn.ReLU()), "the derivative follows from the activation's result"),
        (Normed(lambda u: u.sigmoid() * u), "others read it"),
        (Normed(lambda u: nn.functional.gelu(u) + u), "it is there for the sum"),
        (Normed(nn.GELU(), torch.float32), "on a CPU it would be a pass of its own"),
        (Normed(lambda u: (nn.functional.gelu(u), u)), "it leaves"),
    ],
)
def test_other_results_of_norms_are_kept(module, why):
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    graph = differentiate(extract(module, TensorType((2, 8, 6, 6), dtype)))
    assert "batch_norm_again" not in anew(graph), why


def test_gradients_through_a_norm_made_again_are_right():
    """In bfloat16 on the CPU, beside eager's own error."""
    torch.manual_seed(0)
    module = Normed(nn.GELU(), torch.bfloat16)
    graph = differentiate(extract(module, TensorType((4, 8, 6, 6), "bfloat16")))
    assert anew(graph) == ["batch_norm_again"]
    x, dy = (torch.randn(4, 8, 6, 6, dtype=torch.bfloat16) for _ in range(2))

    def eager(dtype):
        own = copy.deepcopy(module).to(dtype)
        own(x.to(dtype)).backward(dy.to(dtype))
        return {name: p.grad.double() for name, p in own.named_parameters()}

    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    named = [name for name, _ in (*graph.inputs, *graph.output_gradients)]
    given = {**dict(zip(named, (x, dy), strict=True)), **state}
    with torch.no_grad():
        known = evaluated(graph, given)
    exact, theirs = eager(torch.float64), eager(torch.bfloat16)
    for name, value in graph.gradients:
        error, own = (
            float((found - exact[name]).norm() / exact[name].norm())
            for found in (known[value].double(), theirs[name])
        )
        assert error <= 2 * own + 1e-3, name
