"""ReLUs of which training keeps the result with a number added, and not without it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune.graph.ops import op_named
from plantune.graph.ops.cast import INSERTED
from plantune.graph.ops.pointwise import numbers_apart
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.extract import extract, extract_with_outputs
from plantune.graph.types import TensorType
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.runtime.proof.cases import evaluated


class Shifted(nn.Module):
    """A convolution of a ReLU's result plus a number, which may be read on its own, too."""

    def __init__(self, *, beside=False, kernel=1):
        super().__init__()
        self.number = nn.Parameter(torch.full((1,), 3.0))
        self.conv = nn.Conv2d(8, 8, kernel, bias=False)
        self.beside = beside

    def forward(self, x):
        y = x.relu()
        z = self.conv(y + self.number)
        return (z, y) if self.beside else z


def trained(module, dtype="float16", wrt=("x", "number", "conv.weight")):
    graph = extract(module.to(getattr(torch, dtype)), TensorType((2, 8, 5, 4), dtype))
    return differentiate(graph, wrt)


def ops(graph):
    return {node.op for node in graph.nodes}


def test_in_16_bits_the_sum_alone_is_kept():
    graph = trained(Shifted())
    assert {"add_apart", "apart_grad"} <= ops(graph)
    assert not {"add", "relu_grad"} & ops(graph)
    images = [name for name in graph.saved if len(graph.types[name].shape) == 4]
    assert [graph.producers[name].op for name in images if name in graph.producers] == ["add_apart"]


@pytest.mark.parametrize(
    ("module", "changed"),
    [
        (Shifted(), {"dtype": "float32"}),
        (Shifted(beside=True), {}),
        (Shifted(), {"wrt": ("x",)}),  # so that the sum is not read
    ],
)
def test_else_the_result_is(module, changed):
    assert not {"add_apart", "apart_grad"} & ops(trained(module, **changed))


def test_the_blocks_of_a_fixup_network_keep_their_sums():
    graph = extract(SEResNet9Fixup().half(), TensorType((2, 3, 64, 64), "float16"))
    kept = [node for node in differentiate(graph).nodes if node.op == "add_apart"]
    assert len(kept) == 7  # two of each block, but the result of the network


@pytest.mark.parametrize("number", [0.0, 1e-6, 0.3, -0.3, 1.0, -2.0, 1000.0, -1000.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_sum_says_whether_something_was_added(dtype, number):
    """From the least number of the dtype on; and it is off by no more than two of its steps."""
    every = torch.arange(1 << 15, dtype=torch.int16).view(dtype)
    x, b = every[every.isfinite()], torch.tensor([number], dtype=dtype)
    apart = op_named("add_apart").evaluate((x, b), numbers_apart(dtype))[0]
    dx = op_named("apart_grad").evaluate((torch.ones_like(x), apart, b), {})[0]
    floor = 2.0**-126 if number == 0 else 0.0  # what is smaller is nothing beside zero
    assert torch.equal(dx[x > floor] > 0, (x > 0)[x > floor])
    assert dx[0] == 0
    off, step = (apart.double() - x.double() - b.double()).abs(), torch.finfo(dtype).eps
    most = 2 * step * torch.maximum(apart.double().abs(), b.double().abs()) + 2.0**-23
    assert (off <= most).all()


def test_gradients_are_those_of_float64():
    """With a number beside which half of the results vanish."""
    torch.manual_seed(0)
    module = Shifted()
    graph = trained(module)
    x = (torch.randn(2, 8, 5, 4) * 1e-3).half()
    dy = torch.randn(2, 8, 5, 4).half()
    values = {"x": x, **dict(module.named_parameters())}
    names = [name for name, _ in graph.output_gradients]
    known = evaluated(graph, {**values, names[0]: dy})
    wide = x.double().requires_grad_()
    module.double()(wide).backward(dy.double())
    found = known[dict(graph.gradients)["x"]]
    assert (wide.grad != 0).float().mean() > 0.4
    assert torch.equal(found != 0, wide.grad != 0)
    torch.testing.assert_close(found.double(), wide.grad, rtol=2e-2, atol=2e-2)


def test_nan_and_infinity_pass():
    x = torch.tensor([float("nan"), float("inf")], dtype=torch.float16)
    b = torch.ones(1, dtype=torch.float16)
    z = op_named("add_apart").evaluate((x, b), numbers_apart(torch.float16))[0]
    assert z[0].isnan()
    assert z[1] == float("inf")
    dx = op_named("apart_grad").evaluate((torch.ones_like(x), z, b), {})[0]
    assert dx.tolist() == [1.0, 1.0]


def under_autocast(module, dtype=torch.float16, wrt=("x", "number", "conv.weight")):
    """Float32 parameters, whose sum with a ReLU's result is cast for the convolution."""
    arguments = Arguments((TensorType((2, 8, 5, 4)),), autocast=("cuda", dtype))
    return differentiate(extract_with_outputs(module.float().train(), arguments)[0], wrt)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_the_cast_sum_alone_is_kept(dtype):
    graph = under_autocast(Shifted(), dtype)
    assert {"add_apart", "apart_grad"} <= ops(graph)
    assert not {"add", "relu_grad"} & ops(graph)
    made = [name for name in graph.saved if name in graph.producers and name not in graph.constants]
    assert [graph.types[name].torch_dtype for name in made] == [dtype]
    (rounded,) = (node for node in graph.nodes if node.inputs == ("number",) and node.op == "cast")
    assert rounded.name in graph.constants
    assert INSERTED not in rounded.attrs  # no kernel may compare with the number as it is


def test_under_autocast_what_others_read_in_float32_is_kept():
    assert not {"add_apart", "apart_grad"} & ops(under_autocast(Shifted(beside=True)))


@pytest.mark.parametrize("number", [0.0, 1e-7, 0.3, -0.3, 1 / 3, -2.0003, 1000.1, -1000.3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_sum_says_whether_something_was_added(dtype, number):
    """To a number that the dtype does not have: the sum is compared with what it rounds to."""
    every = torch.arange(1 << 15, dtype=torch.int16).view(dtype)
    x, b = every[every.isfinite()].float(), torch.tensor([number])
    apart = op_named("add_apart").evaluate((x, b), numbers_apart(dtype))[0].to(dtype)
    kept = (torch.ones_like(x), apart.float(), b.to(dtype).float())
    dx = op_named("apart_grad").evaluate(kept, {})[0]
    floor = 2.0**-126 if number == 0 else 0.0
    assert torch.equal(dx[x > floor] > 0, (x > 0)[x > floor])
    assert dx[0] == 0


def test_under_autocast_gradients_are_those_of_float64():
    torch.manual_seed(0)
    module = Shifted()
    graph = under_autocast(module)
    x, dy = torch.randn(2, 8, 5, 4) * 1e-3, torch.randn(2, 8, 5, 4).half()
    names = [name for name, _ in graph.output_gradients]
    values = {"x": x, **dict(module.named_parameters()), names[0]: dy}
    known = evaluated(graph, values)
    wide = x.double().requires_grad_()
    module.double()(wide).backward(dy.double())
    found = known[dict(graph.gradients)["x"]]
    assert torch.equal(found != 0, wide.grad != 0)
    torch.testing.assert_close(found.double(), wide.grad, rtol=2e-2, atol=2e-2)
