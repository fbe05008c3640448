"""What plantune has no op for runs as torch's own overload, with torch's own gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune.base.canonical import Attrs
from plantune.errors import InvalidGraph
from plantune.graph.graph import Graph
from plantune.graph.ops import op_named
from plantune.graph.ops.overload import BACKWARD
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.types import TensorType

IMAGE, ROWS = (2, 4, 6, 6), (2, 5, 8)
Extracts = Callable[..., Graph]

LAYERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    *(
        (layer, IMAGE)
        for layer in (
            nn.GELU(),
            nn.GELU("tanh"),
            nn.SiLU(),
            nn.ReLU6(),
            nn.Hardswish(),
            nn.Tanh(),
            nn.LeakyReLU(0.2, inplace=False),
            nn.PReLU(4),
            nn.Softmax(1),
            nn.LayerNorm(6),
            nn.GroupNorm(2, 4),
            nn.InstanceNorm2d(4, affine=True),
            nn.BatchNorm2d(4, affine=False),
            nn.BatchNorm2d(4, track_running_stats=False),
            nn.Conv2d(4, 4, 2, padding="same"),
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
            nn.ConvTranspose2d(4, 3, 3, 2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.AdaptiveAvgPool2d(4),
            nn.AdaptiveAvgPool2d((1, None)),
            nn.AvgPool2d(4, ceil_mode=True),
            nn.AvgPool2d(2, divisor_override=3),
            nn.MaxPool2d(4, ceil_mode=True),
            nn.MaxPool2d(2, dilation=2),
            nn.MaxPool2d(2, return_indices=True),
            nn.PixelShuffle(2),
            nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU6(inplace=True)),
        )
    ),
    (nn.Conv1d(5, 3, 3), ROWS),
    (nn.BatchNorm1d(5), ROWS),
    (nn.Bilinear(8, 8, 3), ROWS),
    (nn.GRU(8, 5), ROWS),
    (nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True), ROWS),
    (nn.MultiheadAttention(8, 2, batch_first=True), ROWS),
    (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), ROWS),
]

CALLS: list[Callable[[Any, Tensor], Any]] = [
    lambda m, x: torch.cat([x, x * 2.0], 1),
    lambda m, x: x[:, 1:, ::2] + 1.0,
    lambda m, x: x[0, ..., None],
    lambda m, x: x.mT,
    lambda m, x: sum(x.chunk(2, 1)),
    lambda m, x: torch.stack(list(x)),
    lambda m, x: x.split([1, 3], 1),
    lambda m, x: x**2,
    lambda m, x: 1 / x,
    lambda m, x: x.exp().log1p(),
    lambda m, x: x @ x,
    lambda m, x: torch.einsum("nchw,nchv->nwv", x, x),
    lambda m, x: torch.where(x > 0, x, x * 0.1),
    lambda m, x: x.masked_fill(x > x.amin(1, True), float("-inf")).softmax(1),
    lambda m, x: x.clamp(min=-0.5, max=float("inf")),
    lambda m, x: x + torch.arange(6, device=x.device),
    lambda m, x: x * torch.full((6,), 2.0, dtype=x.dtype),
    lambda m, x: x.topk(2, 1),
    lambda m, x: x.sort(dim=1, descending=True),
    lambda m, x: x.argmax(1),
    lambda m, x: x.expand(3, 2, 4, 6, 6),
    lambda m, x: torch.add(x, x, alpha=2),
    lambda m, x: torch.div(x, 2, rounding_mode="floor"),
    lambda m, x: torch.mean(x, 1, dtype=torch.float32),
    lambda m, x: x.to(torch.int64) + 1,
    lambda m, x: x.detach() * x,
    lambda m, x: F.pad(x, (1, 2), value=0.5),
    lambda m, x: F.scaled_dot_product_attention(x, x, x),
    lambda m, x: x.index_select(1, torch.arange(2, device=x.device)),
    lambda m, x: m.table((x > 0).long()),
    lambda m, x: F.normalize(x, dim=1),
    lambda m, x: x.var(1, unbiased=False),
    lambda m, x: x if x.shape[0] > 1 else -x,
]


def made(graph: Graph, values: dict[str, Tensor], first: int = 0) -> dict[str, Tensor]:
    """All values, those of the nodes from `first` on computed."""
    known = dict(values)
    for node in graph.nodes[first:]:
        results = node.evaluate([known[name] for name in node.inputs])
        assert [tuple(result.shape) for result in results] == [t.shape for t in node.types]
        known.update(zip(node.outputs, results, strict=True))
    return known


def check_gradients(module: nn.Module, graph: Graph, x: Tensor) -> None:
    """Those of all parameters and of the input, for random gradients of the outputs."""
    names = [name for name, _ in (*graph.parameters, *graph.inputs)]
    whole = differentiate(graph, names)
    state = {name: t.detach() for name, t in (*module.named_parameters(), *module.named_buffers())}
    seeds = {
        name: torch.randn(type_.shape, dtype=type_.torch_dtype)
        for name, type_ in whole.output_gradients
    }
    known = made(whole, {**state, **seeds, "x": x})
    source = x.clone().requires_grad_()
    outputs = torch.utils._pytree.tree_leaves(module(source))
    pairs = [
        (output, seeds[f"d({name})"])
        for output, name in zip(outputs, graph.outputs, strict=True)
        if f"d({name})" in seeds and output.requires_grad
    ]
    wanted = {**dict(module.named_parameters()), "x": source}
    ours = {name: known[value] for name, value in whole.gradients}
    if not pairs:
        assert all(not gradient.any() for gradient in ours.values())
        return
    theirs = torch.autograd.grad(
        [output for output, _ in pairs],
        [wanted[name] for name in ours],
        [seed for _, seed in pairs],
        materialize_grads=True,
        allow_unused=True,
    )
    for gradient, expected in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda value: type(value).__name__)
def test_a_layer(
    layer: nn.Module, shape: Any, training: bool, randomise: Any, takes: Any, calls: Any
) -> None:
    inputs = 3 if isinstance(layer, nn.MultiheadAttention) else 1
    inputs = 2 if isinstance(layer, nn.Bilinear) else inputs
    module = randomise(calls(lambda m, x: m.layer(*[x] * inputs), layer=layer)).train(training)
    x = torch.randn(shape, dtype=torch.float64)
    graph = takes(module, x)
    if not graph.updates:
        check_gradients(module, graph, x)


@pytest.mark.parametrize("forward", CALLS)
def test_a_call(forward: Any, calls: Any, randomise: Any, takes: Any) -> None:
    module = randomise(calls(forward, table=nn.Embedding(2, 3)))
    x = torch.randn(IMAGE, dtype=torch.float64)
    check_gradients(module, takes(module, x), x)


@pytest.fixture
def takes(extracts: Extracts) -> Extracts:
    """As `extracts`; the graph also comes back whole from JSON."""

    def take(module: nn.Module, x: Tensor) -> Graph:
        graph = extracts(module, x, fold=False)
        assert Graph.from_json(graph.to_json()).digest == graph.digest
        return graph

    return take


def test_a_result_never_shares_memory_with_an_input() -> None:
    x = torch.randn(2, 3)
    arguments = '{"dim":1,"self":{"tensor":0},"start":1}'
    (y,) = op_named("aten.slice.Tensor").evaluate([x], Attrs(arguments=arguments))
    expected = x[:, 1:].clone()
    x.zero_()
    assert torch.equal(y, expected)


def test_a_constant_that_an_overload_makes_is_where_the_input_is() -> None:
    (y,) = op_named("aten.ones.default").evaluate(
        [torch.empty(1, device="meta")], Attrs(arguments='{"size":[3]}')
    )
    assert y.device.type == "meta"


def test_an_op_that_this_torch_does_not_have() -> None:
    for name in ("aten.nothing.default", "aten.relu.nothing", "theirs.op.default", "a.b", BACKWARD):
        with pytest.raises(InvalidGraph, match="nor an overload of torch"):
            op_named(name)


def test_inputs_that_an_overload_does_not_take() -> None:
    attrs = Attrs(arguments='{"self":{"tensor":0},"mat2":{"tensor":1}}')
    wide = [TensorType((2, 3)), TensorType((2, 3))]
    with pytest.raises(InvalidGraph, match=r"aten\.mm\.default does not take .*2, 3"):
        op_named("aten.mm.default").infer(wide, attrs)
