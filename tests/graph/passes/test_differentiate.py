"""The backward pass of whole graphs, against torch.autograd on the module in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plantune.errors import InvalidGraph
from plantune.graph.graph import Graph
from plantune.graph.passes import differentiate as differentiation
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.models import resnet
from plantune.models.se_resnet9 import se_resnet9_fixup

Check = Callable[..., Graph]


@pytest.fixture
def check(evaluate: Any, state: Any, draw: Any) -> Check:
    """Differentiates `module` and holds every gradient against autograd; returns the graph."""

    def checked(
        module: nn.Module, x: Tensor, wrt: Collection[str] | None = None, **options: Any
    ) -> Graph:
        forward = extract(module, TensorType(tuple(x.shape), "float64"), **options)
        graph = differentiate(forward, wrt)
        wanted = [name for name, _ in forward.parameters] if wrt is None else list(wrt)
        values = {**draw(graph), **state(module), "x": x}
        known = evaluate(graph, values)

        eager, leaf = copy.deepcopy(module), x.clone().requires_grad_()
        outputs = eager(leaf)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        seeds = [values.get(f"d({name})") for name in graph.outputs]
        reached = [(y, dy) for y, dy in zip(outputs, seeds, strict=True) if dy is not None]
        leaves = {**dict(eager.named_parameters()), "x": leaf}
        exact = torch.autograd.grad(
            [y for y, _ in reached],
            [leaves[name] for name in wanted],
            [dy for _, dy in reached],
            allow_unused=True,
        )
        got = {name: known[value] for name, value in graph.gradients}
        assert set(got) == {n for n, g in zip(wanted, exact, strict=True) if g is not None}
        for name, gradient in zip(wanted, exact, strict=True):
            if gradient is not None:
                # A bias before a batch norm has no gradient but rounding: hence the constant.
                bound = 1e-9 * gradient.abs().max().item() + 1e-12
                torch.testing.assert_close(got[name], gradient, rtol=1e-7, atol=bound, msg=name)
        return graph

    return checked


def everything(module: nn.Module) -> list[str]:
    return [*(name for name, _ in module.named_parameters()), "x"]


@pytest.mark.parametrize(("channels", "batch"), [(3, 2), (1, 1), (14, 3)])
def test_all_gradients_of_se_resnet9(
    channels: int, batch: int, check: Check, randomise: Any
) -> None:
    module = randomise(se_resnet9_fixup(channels, base_planes=32))
    x = torch.randn(batch, channels, 64, 64, dtype=torch.float64)
    graph = check(module, x, everything(module))
    assert len(graph.gradients) == len(list(module.parameters())) + 1


@pytest.mark.parametrize(
    ("block", "mode"), [("BasicBlock", "train"), ("BasicBlock", "eval"), ("Bottleneck", "train")]
)
def test_all_gradients_of_a_resnet(block: str, mode: str, check: Check, randomise: Any) -> None:
    made = resnet.ResNet(getattr(resnet, block), (1, 2, 1, 1), num_classes=5, in_channels=3)
    module = randomise(made).train(mode == "train")
    x = torch.randn(2, 3, 40, 33, dtype=torch.float64)
    graph = check(module, x, everything(module), fold=False)
    assert len(graph.gradients) == len(list(module.parameters())) + 1


def test_folded_scales_have_the_gradients_of_the_module(check: Check, randomise: Any) -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU())
    randomise(module).eval()
    check(module, torch.randn(2, 2, 6, 5, dtype=torch.float64), everything(module), fold=True)


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 1, bias=False),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(4 * 9, 2),
    )


X = torch.randn(2, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "wrt",
    [["x"], ["7.weight"], ["0.bias", "4.weight"], ["1.weight", "x"], ["0.weight"]],
    ids=",".join,
)
def test_a_subset_is_all_that_is_computed(wrt: list[str], check: Check, randomise: Any) -> None:
    module = randomise(small())
    graph = check(module, X, wrt)
    whole = check(module, X, everything(module))
    assert [name for name, _ in graph.gradients] == [n for n, _ in whole.gradients if n in wrt]
    backward = [node for node in graph.nodes if node.name in graph.backward_nodes]
    made_for = {name for name, _ in graph.gradients}
    # Each weight's own node is there exactly where that weight was asked for.
    wgrads = [n.name for n in backward if n.op == "conv2d_wgrad"]
    assert len(wgrads) == len(made_for & {"0.weight", "4.weight"})
    assert ("conv2d_dgrad" in {n.op for n in backward if "0/" in n.name}) == ("x" in wrt)
    # Nothing is computed for nobody, but for the batch norm's gradients, which come together.
    useless = {v for n in backward for v in n.outputs} - graph.results
    useless -= {value for node in backward for value in node.inputs}
    assert all("batch_norm_grad" in value for value in useless)


def test_the_default_is_every_parameter_and_no_input(check: Check, randomise: Any) -> None:
    graph = check(randomise(small()), X)
    assert {name for name, _ in graph.gradients} == {n for n, _ in small().named_parameters()}


def test_frozen_layers_before_the_first_wanted_one_have_no_backward_nodes(
    check: Check, randomise: Any
) -> None:
    graph = check(randomise(small()), X, ["7.weight", "7.bias"])
    assert {name.split("/")[0] for name in graph.backward_nodes} == {"d(7"}


def test_the_order_of_asking_changes_nothing(randomise: Any) -> None:
    forward = extract(small(), TensorType((2, 2, 6, 6)))
    first = differentiate(forward, ["x", "0.weight", "7.bias"])
    again = differentiate(forward, {"7.bias", "x", "0.weight"})
    assert first.digest == again.digest
    assert forward == extract(small(), TensorType((2, 2, 6, 6)))


@pytest.mark.parametrize("wrt", [None, ["x"], ["0.bias", "4.weight"]])
def test_saved_is_exactly_what_the_backward_pass_reads(
    wrt: list[str] | None, randomise: Any, evaluate: Any, draw: Any
) -> None:
    graph = differentiate(extract(randomise(small()), TensorType((2, 2, 6, 6), "float64")), wrt)
    values = draw(graph)
    known = evaluate(graph, values)
    start = graph.backward_from
    assert start is not None
    live = {name for name, _ in (*graph.parameters, *graph.buffers, *graph.output_gradients)}
    held = {name: known[name] for name in (*graph.saved, *live)}

    def backward(values: dict[str, Tensor]) -> dict[str, Tensor]:
        known = dict(values)
        for node in graph.nodes[start:]:
            op = differentiation.op_named(node.op)
            results = op.evaluate([known[v] for v in node.inputs], node.attrs)
            known.update(zip(node.outputs, results, strict=True))
        return {name: known[value] for name, value in graph.gradients}

    expected = {name: known[value] for name, value in graph.gradients}
    torch.testing.assert_close(backward(held), expected)
    for name in graph.saved:
        with pytest.raises(KeyError, match=name):
            backward({key: value for key, value in held.items() if key != name})
    order = list(graph.types)
    assert list(graph.saved) == sorted(graph.saved, key=order.index)


def uses_twice(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    return m.linear(y + y * torch.sigmoid(y)) - y * m.linear.bias


def several_outputs(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    return torch.relu(y), y, y.sum(0)


def a_result_that_weights_do_not_reach(m: Any, x: Tensor) -> Any:
    return m.linear(x), x * 2.0


def an_unread_branch(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    return (y * 0.5).mean() + m.linear.bias.sum()


def an_output_that_is_the_input(m: Any, x: Tensor) -> Any:
    return x, m.linear(x) * x


def a_parameter_returned(m: Any, x: Tensor) -> Any:
    return m.linear.bias, m.linear(x)


BRANCHING = [
    uses_twice,
    several_outputs,
    a_result_that_weights_do_not_reach,
    an_unread_branch,
    an_output_that_is_the_input,
    a_parameter_returned,
]


@pytest.mark.parametrize("wrt", [None, ["x"], ["linear.weight", "linear.bias", "x"]])
@pytest.mark.parametrize("forward", BRANCHING)
def test_branches_add_up(forward: Any, wrt: Any, check: Check, calls: Any, randomise: Any) -> None:
    check(randomise(calls(forward, linear=nn.Linear(3, 3))), X[0, :, :3, 0:3].reshape(6, 3), wrt)


def test_an_output_given_twice_has_one_gradient_that_enters(calls: Any) -> None:
    twice = calls(lambda m, x: (m.linear(x),) * 2, linear=nn.Linear(3, 3, bias=False))
    graph = differentiate(extract(twice, TensorType((6, 3))))
    assert len(graph.outputs) == 2
    assert [name for name, _ in graph.output_gradients] == [f"d({graph.outputs[0]})"]


@pytest.mark.parametrize("kept", [0, -1])
def test_a_dropped_branch_is_noticed(
    kept: int, check: Check, calls: Any, randomise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_part(self: Any, value: str) -> str | None:
        parts = self.parts.get(value)
        return parts[kept] if parts else None

    monkeypatch.setattr(differentiation._Backward, "total", one_part)
    with pytest.raises(AssertionError):
        check(randomise(calls(uses_twice, linear=nn.Linear(3, 3))), X[0, 0, :, :3])


def test_a_second_backward_pass_is_refused() -> None:
    graph = differentiate(extract(small(), TensorType((2, 2, 6, 6))))
    with pytest.raises(InvalidGraph, match="already has a backward pass; there is no double"):
        differentiate(graph)


@pytest.mark.parametrize("name", ["1.running_mean", "relu", "no"])
def test_an_unknown_source_is_named(name: str) -> None:
    with pytest.raises(InvalidGraph, match=f"no input or parameter is called {name}"):
        differentiate(extract(small(), TensorType((2, 2, 6, 6))), ["x", name])


class Gated(nn.Module):
    """An image times the sigmoid of its mean, which has a gradient of fewer elements."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        mean = x.mean((2, 3), keepdim=True)
        return x * mean.sigmoid() if self.first else mean.sigmoid() + x


@pytest.mark.parametrize("first", [False, True])
def test_the_gradient_of_a_mean_is_added_as_it_is(first: bool, check: Check) -> None:
    """Repeated first, it cost a pass over the whole image to write and one to read."""
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    graph = check(Gated(first=first), x, ["x"])
    assert "broadcast_to" not in [node.op for node in graph.nodes if node.name.startswith("d(")]


def test_a_mean_alone_is_repeated(check: Check) -> None:
    class Means(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            return x.mean((2, 3)) + x.mean((2, 3), keepdim=True).sigmoid().flatten(1)

    graph = check(Means(), torch.randn(2, 3, 4, 4, dtype=torch.float64), ["x"])
    assert "broadcast_to" in [node.op for node in graph.nodes]
