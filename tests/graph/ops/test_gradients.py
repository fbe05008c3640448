"""Each backward rule against torch.autograd and finite differences, and broken ones that fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph
from plantune.graph.ops import OPS, Gradient, Op
from plantune.graph.ops.functions import FUNCTIONS
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.types import TensorType

Shape = tuple[int, ...]
Values = dict[str, Tensor]
Evaluate = Callable[[Graph, Values], Values]


@dataclass(frozen=True)
class Case:
    op: str
    shapes: tuple[Shape, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    reads: tuple[int, ...] = ()
    """Which source each input is; by default one each."""
    fixed: tuple[int, ...] = ()
    """Sources without a gradient, such as running statistics."""
    positive: tuple[int, ...] = ()
    """Sources away from 0, such as divisors."""

    def __str__(self) -> str:
        return f"{self.op}-{self.shapes}-{','.join(map(str, self.reads))}"


def conv(x: Shape, w: Shape, stride: Shape, padding: Shape, **more: Any) -> Case:
    attrs = {"stride": stride, "padding": padding, "dilation": (1, 1), "groups": 1, **more}
    return Case("conv2d", (x, w), attrs)


def pools(x: Shape, kernel: Shape, stride: Shape, padding: Shape) -> Iterator[Case]:
    window = {"kernel": kernel, "stride": stride, "padding": padding}
    yield Case("max_pool2d", (x,), window)
    yield Case("avg_pool2d", (x,), {**window, "count_padding": True})
    yield Case("avg_pool2d", (x,), {**window, "count_padding": False})


def norm(x: Shape) -> Case:
    return Case("batch_norm", (x, *[(x[1],)] * 4), {"eps": 1e-3, "momentum": 0.2}, fixed=(3, 4))


def sample_norms() -> Iterator[Case]:
    for count in (2, 1, 0):
        yield Case("layer_norm", ((2, 3, 4), *((3, 4),) * count), {"axes": 2, "eps": 1e-3})
        yield Case("group_norm", ((2, 6, 3), *((6,),) * count), {"groups": 3, "eps": 1e-3})
    yield Case("group_norm", ((3, 4), (4,), (4,)), {"groups": 2, "eps": 0.1})


FLAGS = [
    {"transpose_a": a, "transpose_b": b} for a, b in itertools.product((False, True), repeat=2)
]
CASES = [
    conv((2, 3, 7, 5), (4, 3, 3, 3), (1, 1), (1, 1)),
    conv((1, 2, 8, 7), (3, 2, 3, 3), (2, 2), (1, 1)),
    conv((2, 5, 3, 3), (4, 5, 1, 1), (1, 1), (0, 0)),
    conv((1, 2, 6, 5), (3, 2, 1, 1), (2, 2), (0, 0)),
    conv((1, 2, 9, 8), (2, 2, 2, 3), (3, 2), (0, 2), dilation=(2, 3)),
    conv((2, 4, 5, 5), (6, 2, 3, 3), (2, 1), (1, 0), groups=2),
    conv((1, 3, 4, 4), (3, 1, 3, 3), (1, 1), (1, 1), groups=3),
    conv((1, 3, 15, 15), (2, 3, 7, 7), (2, 2), (3, 3)),
    *pools((2, 3, 7, 6), (3, 3), (2, 2), (1, 1)),
    *pools((1, 1, 5, 8), (2, 3), (3, 2), (0, 1)),
    *pools((2, 2, 4, 4), (1, 1), (2, 2), (0, 0)),
    *[norm(shape) for shape in [(2, 3, 4, 5), (1, 2, 3, 1), (5, 2)]],
    *sample_norms(),
    *[
        Case("matmul", (a, b), {"transpose_a": a[0] == 5, "transpose_b": b[0] == 7})
        for a in [(3, 5), (5, 3)]
        for b in [(5, 7), (7, 5)]
    ],
    *[Case("matmul", ((4, 4),), a, reads=(0, 0)) for a in FLAGS],
    *[
        Case(op, ((2, 3, 4), other))
        for op in ("add", "sub", "mul")
        for other in [(2, 3, 4), (1,), (), (3, 1), (2, 1, 4), (4,)]
    ],
    *[Case(op, ((2, 3),), reads=(0, 0)) for op in ("add", "sub", "mul")],
    *[
        Case("div", ((2, 3, 4), other), positive=(1,))
        for other in [(2, 3, 4), (1,), (), (3, 1), (2, 1, 4), (4,)]
    ],
    Case("div", ((2, 3),), reads=(0, 0), positive=(0,)),
    Case("cast", ((3, 4),), {"dtype": "float64"}),
    *[
        Case(op, ((2, 3, 4), (size,)), {"axis": axis})
        for op in ("add_channel", "mul_channel")
        for axis, size in enumerate((2, 3, 4))
    ],
    *[Case(op, ((5,),), {"axis": 0}, reads=(0, 0)) for op in ("add_channel", "mul_channel")],
    Case("affine", ((3, 4),), {"alpha": -2.5, "beta": 0.75}),
    Case("affine", ((3, 4),), {"alpha": 1.0, "beta": 0.75}),
    *[Case(name, ((3, 4),)) for name in FUNCTIONS],
    *[
        Case(op, (shape,), {"dims": dims, "keepdim": keepdim})
        for op in ("sum", "mean")
        for shape, dims in [((2, 3, 4), (1,)), ((2, 3, 4, 5), (2, 3)), ((1, 3), (0,)), ((3,), (0,))]
        for keepdim in (False, True)
    ],
    *[Case("broadcast_to", (s,), {"shape": (2, 3, 4)}) for s in [(3, 1), (1,), (), (2, 3, 4)]],
    *[Case("reshape", ((2, 6),), {"shape": shape}) for shape in [(3, 4), (12,), (2, 6)]],
    *[Case("permute", ((2, 3, 4),), {"dims": dims}) for dims in [(2, 0, 1), (1, 2, 0), (0, 2, 1)]],
    Case("space_to_depth", ((2, 3, 4, 6),), {"block": 2}),
    Case("depth_to_space", ((1, 18, 2, 1),), {"block": 3}),
    Case("gru_scan", ((4, 2, 9), (2, 3), (9, 3), (9,)), {"resets": False}),
    Case("lstm_scan", ((4, 2, 12), (2, 3), (2, 3), (12, 3), (12,)), {"resets": False}),
]  # fmt: skip

# How many inputs have a gradient, where the op's arity does not say it.
BROKEN = {"batch_norm": 3, "layer_norm": 3, "group_norm": 3, "gru_scan": 4, "lstm_scan": 5}
# The rule of a Function's own gradient is what the Function says: tests/runtime/test_functions.py.
RULES = {
    name: op
    for name, op in OPS.items()
    if type(op).gradient is not Op.gradient and name != "own_gradient"
}


def graph_of(case: Case) -> Graph:
    builder = GraphBuilder()
    for i, shape in enumerate(case.shapes):
        builder.parameter(f"v{i}", TensorType(shape, "float64"))
    reads = case.reads or range(len(case.shapes))
    outputs = builder.emit(case.op, *(f"v{i}" for i in reads), **case.attrs)
    return builder.build((outputs[0],))


def check_rule(case: Case, evaluate: Evaluate, draw: Callable[[Graph], Values]) -> None:
    """The gradients of one op in one graph are those of its meaning."""
    forward = graph_of(case)
    wanted = [f"v{i}" for i in range(len(case.shapes)) if i not in case.fixed]
    graph = differentiate(forward, wanted)
    values = draw(graph)
    above = (*case.fixed, *case.positive)
    values.update({f"v{i}": values[f"v{i}"].abs() + 0.5 for i in above})
    (output,) = graph.outputs
    dy = values[f"d({output})"]

    known = evaluate(graph, values)
    got = {source: known[value] for source, value in graph.gradients}

    assert sorted(got) == wanted
    leaves = {name: values[name].clone().requires_grad_() for name in wanted}
    y = evaluate(forward, {**values, **leaves})[output]
    for name, exact in zip(wanted, torch.autograd.grad(y, list(leaves.values()), dy), strict=True):
        torch.testing.assert_close(got[name], exact, rtol=1e-10, atol=1e-10)

    step = 1e-6
    for name in wanted:
        direction = torch.randn_like(values[name])
        ahead, behind = (
            evaluate(forward, {**values, name: values[name] + sign * step * direction})[output]
            for sign in (1, -1)
        )
        slope = ((ahead - behind) * dy).sum() / (2 * step)
        torch.testing.assert_close((got[name] * direction).sum(), slope, rtol=1e-5, atol=1e-6)


def test_every_rule_has_a_case() -> None:
    assert {case.op for case in CASES} == set(RULES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case, evaluate: Evaluate, draw: Callable[[Graph], Values]) -> None:
    check_rule(case, evaluate, draw)


def scaled(grad: Gradient, value: str) -> str | None:
    return grad.emit("affine", value, alpha=1.01, beta=0.0)


def shifted(grad: Gradient, value: str) -> str | None:
    return grad.emit("affine", value, alpha=1.0, beta=0.1)


def dropped(grad: Gradient, value: str) -> str | None:
    return None


@pytest.mark.parametrize("break_it", [scaled, shifted, dropped])
@pytest.mark.parametrize(
    ("op", "position"),
    [(name, i) for name in RULES for i in range(BROKEN.get(name, RULES[name].arity))],
)
def test_a_broken_rule_is_noticed(
    op: str,
    position: int,
    break_it: Callable[[Gradient, str], str | None],
    evaluate: Evaluate,
    draw: Callable[[Graph], Values],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = type(RULES[op]).gradient

    def broken(self: Op, grad: Gradient) -> tuple[str | None, ...]:
        results = list(rule(self, grad))
        assert results[position] is not None
        results[position] = break_it(grad, results[position])
        return tuple(results)

    case = next(case for case in CASES if case.op == op)
    check_rule(case, evaluate, draw)
    monkeypatch.setattr(type(RULES[op]), "gradient", broken)
    with pytest.raises(AssertionError):
        check_rule(case, evaluate, draw)


@pytest.mark.parametrize("op", ["rsqrt", "sum_to"])
def test_an_op_without_a_rule_says_so(op: str) -> None:
    attrs = {"rsqrt": {"eps": 0.1}, "sum_to": {"shape": (1,)}}[op]
    with pytest.raises(NotImplementedError, match=f"op {op} has no backward rule"):
        differentiate(graph_of(Case(op, ((3,),), attrs)))


def test_equal_values_in_a_window_send_the_gradient_to_the_first() -> None:
    """As torch does: a tie is split nowhere."""
    window = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0)}
    graph = differentiate(graph_of(Case("max_pool2d", ((1, 1, 2, 4),), window)))
    x = torch.tensor([[1.0, 5, 2, 2], [5, 5, 2, 2]]).view(1, 1, 2, 4)
    _, places = OPS["max_pool2d"].evaluate([x], graph.nodes[0].attrs)
    dy = torch.tensor([7.0, 9.0]).view(1, 1, 1, 2)
    (dx,) = OPS["max_pool2d_grad"].evaluate([dy, places], graph.nodes[1].attrs)
    assert dx.flatten().tolist() == [0, 7, 9, 0, 0, 0, 0, 0]
