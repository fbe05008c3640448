"""What draws random numbers gives what eager gives from the same state of torch's generator, and
has the gradient of the very numbers that it drew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune.base.canonical import Attrs
from plantune.errors import InvalidGraph, UnsupportedModule
from plantune.graph.graph import Graph
from plantune.graph.ops import op_named
from plantune.graph.ops.history import History, history_of
from plantune.graph.ops.overload_backward import READS_NOTHING, WANTED
from plantune.graph.partition import partition_into
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType

IMAGE = (2, 4, 6, 6)
TYPE = TensorType(IMAGE, "float64")

Forward = Callable[[Any, Tensor], Any]
CASES: dict[str, tuple[Forward, nn.Module | None]] = {
    "dropout": (lambda m, x: F.dropout(x, 0.3), None),
    "in place": (lambda m, x: F.dropout(x * 1.0, 0.3, inplace=True), None),
    "channels": (lambda m, x: m.layer(x), nn.Dropout2d(0.4)),
    "alpha": (lambda m, x: m.layer(x), nn.AlphaDropout(0.4)),
    "alpha of channels": (lambda m, x: m.layer(x), nn.FeatureAlphaDropout(0.4)),
    "native": (lambda m, x: torch.native_dropout(x, 0.5, True), None),
    "rrelu": (lambda m, x: m.layer(x), nn.RReLU()),
    "gumbel": (lambda m, x: F.gumbel_softmax(x, dim=1), None),
    "gumbel, hard": (lambda m, x: F.gumbel_softmax(x, hard=True, dim=1), None),
    "rand_like": (lambda m, x: x * torch.rand_like(x), None),
    "randn_like": (lambda m, x: x + torch.randn_like(x) * 0.1, None),
    "rand": (lambda m, x: x + torch.rand(6, 6, device=x.device), None),
    "randint": (lambda m, x: x + torch.randint(0, 5, (6,)), None),
    "randperm": (lambda m, x: x[:, :, torch.randperm(6)], None),
    "normal": (lambda m, x: x + torch.normal(0.0, 1.0, (6,)), None),
    "normal of means": (lambda m, x: torch.normal(x, 1.0), None),
    "bernoulli": (lambda m, x: x * torch.bernoulli(torch.sigmoid(x)), None),
    "bernoulli_": (lambda m, x: x * torch.empty_like(x).bernoulli_(), None),
    "bernoulli_ of chances": (
        lambda m, x: x * torch.empty_like(x).bernoulli_(torch.sigmoid(x)),
        None,
    ),
    "normal_": (lambda m, x: x * torch.empty_like(x).normal_(0, 2), None),
    "uniform_": (lambda m, x: x * torch.empty_like(x).uniform_(-1, 2), None),
    "stochastic depth": (
        lambda m, x: x * x.new_empty((2, 1, 1, 1)).bernoulli_(0.5).div_(0.5),
        None,
    ),
    "multinomial": (lambda m, x: x.flatten(1).softmax(1).multinomial(3), None),
    "poisson": (lambda m, x: torch.poisson(x.exp()), None),
    "fractional": (lambda m, x: F.fractional_max_pool2d(x, 2, output_size=3), None),
    "attention": (lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4), None),
    "attention layer": (
        lambda m, x: m.layer(x[:, 0], x[:, 1], x[:, 2])[0],
        nn.MultiheadAttention(6, 2, dropout=0.3),
    ),
    "recurrent": (lambda m, x: m.layer(x[:, 0])[0], nn.LSTM(6, 5, 2, dropout=0.5)),
    "encoder": (lambda m, x: m.layer(x[:, 0]), nn.TransformerEncoderLayer(6, 2, 8, 0.2)),
    "weights": (lambda m, x: F.linear(x, F.dropout(m.layer.weight)), nn.Linear(6, 4, bias=False)),
}


def evaluated(graph: Graph, known: dict[str, Tensor], floats: Any = None) -> dict[str, Tensor]:
    known = dict(known)
    for node in graph.nodes:
        values = node.evaluate([known[name] for name in node.inputs], floats)
        known.update(zip(node.outputs, values, strict=True))
    return known


def sources(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {"x": x, **{name: tensor.detach() for name, tensor in named}}


@pytest.mark.parametrize("case", CASES)
def test_it_draws_what_eager_draws(case: str, calls: Any, randomise: Any) -> None:
    forward, layer = CASES[case]
    module = randomise(calls(forward, **({} if layer is None else {"layer": layer}))).train()
    x = torch.randn(IMAGE, dtype=torch.float64)
    graph = extract(module, TYPE, fold=False)
    assert graph.draws
    whole = differentiate(graph, [name for name, _ in (*graph.parameters, *graph.inputs)])
    assert Graph.from_json(whole.to_json()).digest == whole.digest
    seeds = {name: torch.randn(t.shape).double() for name, t in whole.output_gradients}
    torch.manual_seed(7)
    known = evaluated(whole, {**sources(module, x), **seeds})

    torch.manual_seed(7)
    source = x.clone().requires_grad_()
    made = torch.utils._pytree.tree_leaves(module(source))
    for name, expected in zip(graph.outputs, made, strict=True):
        torch.testing.assert_close(known[name], expected.detach(), rtol=1e-9, atol=1e-9)
    smooth = [(y, f"d({n})") for y, n in zip(made, graph.outputs, strict=True) if y.requires_grad]
    if not smooth:
        assert not whole.gradients
        return
    wanted = {**dict(module.named_parameters()), "x": source}
    expected = torch.autograd.grad(
        [y for y, _ in smooth],
        [wanted[name] for name, _ in whole.gradients],
        [seeds[name] for _, name in smooth],
        materialize_grads=True,
        allow_unused=True,
    )
    for (_, value), gradient in zip(whole.gradients, expected, strict=True):
        torch.testing.assert_close(known[value], gradient, rtol=1e-9, atol=1e-9)


RUNS: list[None] = []


@torch.library.custom_op("plantune_tests::spoiled", mutates_args=())
def spoiled(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` with noise, and the noise. It does not say that it draws."""
    RUNS.append(None)
    noise = torch.rand_like(x)
    return x * noise, noise


@spoiled.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


spoiled.register_autograd(
    lambda ctx, dy, _: dy * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


def test_a_custom_op_runs_once_and_its_gradient_follows_what_it_drew(calls: Any) -> None:
    graph = extract(calls(lambda m, x: spoiled(x)[0]), TYPE, fold=False)
    whole = differentiate(graph, ["x"])
    x, dy = torch.randn(2, *IMAGE, dtype=torch.float64)
    for _ in range(2):
        RUNS.clear()
        known = evaluated(whole, {"x": x, f"d({whole.outputs[0]})": dy})
        (gradient,) = (known[value] for _, value in whole.gradients)
        torch.testing.assert_close(gradient * x, known[whole.outputs[0]] * dy)
        assert len(RUNS) == 1


def test_the_gradient_of_each_pass_follows_its_own_mask(calls: Any) -> None:
    whole = differentiate(extract(calls(lambda m, x: F.dropout(x)), TYPE), ["x"])
    ones = torch.ones(IMAGE, dtype=torch.float64)
    masks = []
    for _ in range(2):
        known = evaluated(whole, {"x": ones, f"d({whole.outputs[0]})": ones})
        masks.append(known[whole.outputs[0]])
        backward = whole.nodes[-1]
        for _ in range(2):  # a backward pass may run again
            (gradient,) = backward.evaluate([known[name] for name in backward.inputs])
            assert torch.equal(gradient, masks[-1])
    assert not torch.equal(*masks)


def test_the_numbers_do_not_follow_the_layout() -> None:
    dropout, x = op_named("aten.dropout.default"), torch.randn(IMAGE)
    attrs = Attrs(arguments='{"input":{"tensor":0},"p":0.5,"train":true}', draws="float32")
    made = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(3)
        made += dropout.evaluate([x.contiguous(memory_format=layout)], attrs)
    assert torch.equal(*made)


def test_a_reference_in_float64_draws_the_same_numbers(calls: Any) -> None:
    graph = extract(calls(lambda m, x: F.rrelu(x * 3.0, training=True)), TensorType(IMAGE))
    x, made = torch.randn(IMAGE), []
    for floats, given in ((None, x), (torch.float64, x.double())):
        torch.manual_seed(3)
        made.append(evaluated(graph, {"x": given}, floats)[graph.outputs[0]])
    assert made[1].dtype == torch.float64
    torch.testing.assert_close(made[0].double(), made[1], rtol=1e-6, atol=1e-6)


def test_nothing_random_is_a_constant(calls: Any) -> None:
    module = calls(lambda m, x: x * F.dropout(m.row), row=nn.Parameter(torch.ones(6)))
    graph = extract(module, TensorType(IMAGE))
    assert not graph.constants & {node.name for node in graph.nodes}


def test_numbers_are_drawn_in_the_modules_order(calls: Any) -> None:
    graph = extract(calls(lambda m, x: torch.rand_like(x) + torch.rand_like(x.exp())), TYPE)
    first, _, second, added = (node.name for node in graph.nodes)
    rest = [(node.name,) for node in graph.nodes[1:-1]]
    steps = partition_into(graph, [*reversed(rest), (first,), (added,)])
    assert [step.name for step in steps if step.draws] == [first, second]
    with pytest.raises(InvalidGraph, match="wait for each other"):
        partition_into(graph, [(first, added), *rest])


def test_a_generator_of_its_own_is_refused(calls: Any) -> None:
    own = torch.Generator()
    with pytest.raises(UnsupportedModule, match="which draws from a generator of its own"):
        extract(calls(lambda m, x: x + torch.rand(6, generator=own)), TYPE)


@pytest.mark.parametrize(
    ("name", "forward"),
    {
        "aten.cat.default": lambda m, x: torch.cat([x, x * 2.0]),
        "aten.stack.default": lambda m, x: torch.stack([x, x * 2.0]),
        "aten.slice.Tensor": lambda m, x: x[:, 1:],
        "aten.select.int": lambda m, x: x[:, 1],
        "aten.chunk.default": lambda m, x: x.chunk(2, 1)[0],
        "aten.split_with_sizes.default": lambda m, x: x.split([1, 3], 1)[1],
        "aten.dropout.default": lambda m, x: F.dropout(x),
        "aten.roll.default": lambda m, x: x.roll(1, 1),
        "aten.flip.default": lambda m, x: x.flip(1),
        "aten.pixel_shuffle.default": lambda m, x: F.pixel_shuffle(x, 2),
        "aten.cumsum.default": lambda m, x: x.cumsum(1),
        "aten.masked_fill.Scalar": lambda m, x: (x * 2.0).masked_fill(x > 0, 1.0),
        "aten.where.self": lambda m, x: torch.where(x > 0, x * 2.0, x),
    }.items(),
)
def test_what_a_gradient_does_not_read_is_not_kept(name: str, forward: Any, calls: Any) -> None:
    assert name in READS_NOTHING
    whole = differentiate(extract(calls(forward), TYPE, fold=False), ["x"])
    backward = next(node for node in whole.nodes if node.op == f"backward_of_{name}")
    forward_node = next(node for node in whole.nodes if node.op == name)
    floats = {value for value in forward_node.inputs if whole.types[value].is_float}
    assert floats.isdisjoint(backward.inputs)
    # Without what autograd remembers, as when the step is measured alone.
    inputs = [
        torch.zeros(whole.types[v].shape, dtype=whole.types[v].torch_dtype) for v in backward.inputs
    ]
    assert [y.shape for y in backward.evaluate(inputs)] == [t.shape for t in backward.types]


def test_what_is_remembered_holds_no_more_than_the_gradient_reads(calls: Any) -> None:
    whole = differentiate(extract(calls(lambda m, x: F.dropout(x)), TYPE), ["x"])
    x = torch.ones(IMAGE, dtype=torch.float64)
    node = next(node for node in whole.nodes if WANTED in node.attrs)
    y, token = node.evaluate([x])
    history = history_of(token)
    assert isinstance(history, History)
    (mask,) = history.held
    assert mask not in {t.untyped_storage().data_ptr() for t in (x, y)}
