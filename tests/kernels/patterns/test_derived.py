"""Which values follow from weights place by place, and that they are right."""

from __future__ import annotations

import pytest
import torch

from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph
from plantune.graph.types import TensorType
from plantune.kernels.patterns.derived import INPUTS_MAX, derived_values
from plantune.plans.workload import Workload


class Weights:
    """Spells graphs over weights: `w` declares one, `__call__` adds a node."""

    def __init__(self, dtype: str) -> None:
        self.graph, self.dtype = GraphBuilder(), dtype

    def w(self, *shape: int, dtype: str | None = None) -> str:
        name = f"w{len(self.graph.parameters)}"
        return self.graph.parameter(name, TensorType(shape, dtype or self.dtype))

    def __call__(self, op: str, *inputs: str, **attrs: object) -> str:
        return self.graph.emit(op, *inputs, **attrs)[0]


def graph_of(emit, dtype: str = "float32") -> Graph:
    builder = Weights(dtype)
    return builder.graph.build((emit(builder),))


def scale(b: Weights) -> str:
    return b("mul", b.w(6), b("rsqrt", b.w(6), eps=1e-3))


def shift(b: Weights) -> str:
    return b("sub", b.w(6), b("mul", b.w(6), scale(b)))


def filter_by_channel(b: Weights) -> str:
    return b("mul_channel", b.w(6, 4, 3, 3), b("relu", b.w(6)), axis=0)


def filter_by_inputs(b: Weights) -> str:
    return b("mul", b.w(6, 4, 3, 3), b.w(4, 1, 1))


def number(b: Weights) -> str:
    return b("affine", b("sigmoid", b.w(1)), alpha=-2.5, beta=1e-7)


def mixed(b: Weights) -> str:
    return b("add", b("cast", b.w(6, dtype="float16"), dtype="float32"), b.w(1))


def broadcast(b: Weights) -> str:
    return b("broadcast_to", b.w(6, 1, 1), shape=(2, 6, 4, 3))


def read_twice(b: Weights) -> str:
    w = b.w(6)
    return b("div", b("affine", w, alpha=1.0, beta=2.0), b("mul", w, w))


EMITS = [
    scale, shift, filter_by_channel, filter_by_inputs, number, mixed, broadcast, read_twice
]  # fmt: skip


def evaluated(graph: Graph, weights):
    known = {name: tensor.double() for name, tensor in weights.items()}
    for node in graph.nodes:
        made = node.evaluate([known[name] for name in node.inputs], torch.float64)
        known.update(zip(node.outputs, made, strict=True))
    return known


@pytest.mark.parametrize("emit", EMITS, ids=lambda emit: emit.__name__)
def test_a_value_of_weights_alone_is_derived(emit):
    graph = graph_of(emit)
    weights = {n: torch.rand(t.shape).to(t.torch_dtype) + 0.5 for n, t in graph.parameters}
    found = derived_values(graph)
    right = evaluated(graph, weights)
    assert set(found) == {node.name for node in graph.nodes}
    for name, derived in found.items():
        assert derived.shape == graph.types[name].shape
        torch.testing.assert_close(
            derived.evaluate(weights).double(), right[name], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("emit", EMITS, ids=lambda emit: emit.__name__)
def test_operands_are_spread_without_a_copy(emit):
    """Each of the value's elements has those of its operands at the same place."""
    graph = graph_of(emit)
    weights = {n: torch.rand(t.shape).to(t.torch_dtype) for n, t in graph.parameters}
    for name, tensor in list(weights.items()):  # with gaps, from an offset on
        wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
        weights[name] = wide[..., 1].copy_(tensor)
    derived = derived_values(graph)[graph.outputs[0]]
    spread = list(derived.spread(weights))
    assert [name for _, name in spread] == [operand.name for operand in derived.operands]
    for wide, name in spread:
        assert wide.shape == derived.shape
        assert wide.untyped_storage().data_ptr() == weights[name].untyped_storage().data_ptr()
        # As `filter_by_channel` is read by its first axis, all others are by their last ones.
        first = emit is filter_by_channel and weights[name].dim() == 1
        like = weights[name].view(-1, 1, 1, 1) if first else weights[name]
        assert torch.equal(wide, like.expand(derived.shape))


ROUNDED = {
    "a parameter": lambda b: b("cast", b.w(6), dtype="float16"),
    "an expression": lambda b: b("cast", b("mul", b.w(6), b.w(6)), dtype="bfloat16"),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_a_cast_of_the_users_rounds_though_a_kernel_keeps_it_in_float32(name):
    graph = graph_of(ROUNDED[name])
    derived = derived_values(graph)[graph.outputs[0]]
    weights = {n: torch.rand(t.shape) for n, t in graph.parameters}
    right = evaluated(graph, weights)[graph.outputs[0]]
    dtype = graph.types[graph.outputs[0]].torch_dtype
    assert torch.equal(derived.evaluate(weights), right.float().to(dtype).float())
    element = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}[dtype]
    assert derived.result.startswith(f"plantune::rounded<{element}>(")


def five(b: Weights) -> str:
    value = b.w(6)
    for _ in range(INPUTS_MAX):
        value = b("add", value, b.w(6))
    return value


REFUSED = {
    "no pointwise op": lambda b: b("reshape", b("relu", b.w(6)), shape=(2, 3)),
    "a sum": lambda b: b("mean", b("relu", b.w(2, 3, 4, 4)), dims=(2, 3), keepdim=True),
    "integers": lambda b: b("cast", b.w(6, dtype="int64"), dtype="float32"),
    "float64": lambda b: b("relu", b.w(6, dtype="float64")),
    "float64 on the way": lambda b: b(
        "cast", b("relu", b("cast", b.w(6), dtype="float64")), dtype="float32"
    ),
    "more tensors than a job has": five,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_an_expression_of_floats_is_left_to_the_framework(name):
    graph = graph_of(REFUSED[name])
    assert graph.outputs[0] not in derived_values(graph)


def test_what_stands_on_the_way_is_derived_all_the_same():
    graph = graph_of(five)
    assert len(derived_values(graph)) == INPUTS_MAX - 1


def test_what_follows_from_an_input_is_not_derived():
    builder = Weights("float32")
    x = builder.graph.input("x", TensorType((6,), "float32"))
    graph = builder.graph.build((builder("add", x, builder("relu", builder.w(6))),))
    assert set(derived_values(graph)) == {"relu"}


@pytest.mark.parametrize("network", ["resnet18", "se_resnet9_fixup"])
def test_networks_leave_nothing_to_the_framework(network):
    """All that follows from their weights is vectors of batch norms and the like."""
    graph = Workload(network, 8, 3, "infer", "float16", "sm90").graph
    made = {node.name for node in graph.nodes if graph.constants.issuperset(node.outputs)}
    assert made == set(derived_values(graph))
