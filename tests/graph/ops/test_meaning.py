"""What each op computes, against a plain formula in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.graph.ops import OPS, conv, pool, scan, translate

Shape = tuple[int, ...]


def batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, a: dict[str, Any]
) -> tuple[Tensor, ...]:
    channels = x.transpose(0, 1).flatten(1)
    batch_mean = channels.mean(1)
    batch_var = (channels - batch_mean[:, None]).square().mean(1)
    invstd = 1 / (batch_var + a["eps"]).sqrt()
    column = (slice(None), *[None] * (x.dim() - 2))
    y = (x - batch_mean[column]) * (invstd * weight)[column] + bias[column]
    count, m = channels.shape[1], a["momentum"]
    unbiased = batch_var * count / (count - 1)
    return y, batch_mean, invstd, mean + m * (batch_mean - mean), var + m * (unbiased - var)


def batch_norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor, a: dict[str, Any]
) -> tuple[Tensor, ...]:
    column = (slice(None), *[None] * (x.dim() - 2))
    normal = (x - mean[column]) * invstd[column]
    axes = [i for i in range(x.dim()) if i != 1]
    dbias, dweight = dy.sum(axes), (dy * normal).sum(axes)
    count = x.numel() // x.shape[1]
    inside = dy - dbias[column] / count - normal * dweight[column] / count
    return inside * (weight * invstd)[column], dweight, dbias


def batch_norm_again(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor
) -> Tensor:
    column = (slice(None), *[None] * (x.dim() - 2))
    return (x - mean[column]) * (invstd * weight)[column] + bias[column]


def space_to_depth(x: Tensor, b: int) -> Tensor:
    return torch.cat([x[:, :, i::b, j::b] for i in range(b) for j in range(b)], 1)


def depth_to_space(x: Tensor, b: int) -> Tensor:
    n, c, h, w = x.shape
    y = x.new_empty(n, c // (b * b), h * b, w * b)
    for part, (i, j) in zip(x.chunk(b * b, 1), itertools.product(range(b), repeat=2), strict=True):
        y[:, :, i::b, j::b] = part
    return y


def wide(*shape: Any, **how: Any) -> Tensor:
    """Beyond every kink."""
    return torch.randn(*shape, **how) * 4


def normal_below(x: Tensor) -> Tensor:
    return torch.distributions.Normal(0.0, 1.0).cdf(x)


def softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20, x, (1 + x.exp()).log())


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda x: 1 - 2 / (1 + (2 * x).exp()),
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * normal_below(x),
    "gelu_tanh": lambda x: x / (1 + (-math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)).exp()),
    "relu6": lambda x: ((x.abs() + x) - ((x - 6).abs() + x - 6)) / 2,
    "hardtanh": lambda x: ((x + 1).abs() - (x - 1).abs()) / 2,
    "hardswish": lambda x: x * ((x + 3).abs() - (x - 3).abs() + 6) / 12,
    "hardsigmoid": lambda x: ((x + 3).abs() - (x - 3).abs() + 6) / 12,
    "leaky_relu": lambda x: torch.where(x < 0, x / 100, x),
    "leaky_relu_10": lambda x: torch.where(x < 0, x / 10, x),
    "leaky_relu_20": lambda x: torch.where(x < 0, x / 5, x),
    "elu": lambda x: torch.where(x > 0, x, x.clamp(max=0).exp() - 1),
    "softplus": softplus,
    "mish": lambda x: x * (1 - 2 / (1 + (2 * softplus(x)).exp())),
}
SIXTH = torch.tensor(1 / 6).double()  # torch's is a float32, whatever it multiplies
SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hardsigmoid": lambda dy, x: dy * (x.abs() < 3) * SIXTH,
    # Of the result:
    "tanh": lambda dy, y: dy - dy * y * y,
    "relu6": lambda dy, y: dy * (y > 0) * (y < 6),
    "hardtanh": lambda dy, y: dy * (y > -1) * (y < 1),
}


def slope(name: str, dy: Tensor, x: Tensor) -> Tensor:
    """dy times the slope of the formula at x."""
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(FORMULAS[name](leaf), leaf, dy)
    return dx


def slope_of(name: str) -> Case:
    formula = SLOPES.get(name, lambda dy, x: slope(name, dy, x))
    return Case(f"{name}_grad", ((9, 9), (9, 9)), formula, {}, wide)


@dataclass(frozen=True)
class Case:
    op: str
    shapes: tuple[Shape, ...]
    formula: Callable[..., Any]
    attrs: dict[str, Any] = field(default_factory=dict)
    draw: Callable[..., Tensor] = torch.randn
    """How the last input is drawn."""


def added_apart(x: Tensor, y: Tensor) -> Tensor:
    """By single numbers."""
    (number,) = y.tolist()
    next_ = number + max(abs(number) / 4, 0.125)
    rows = [[max(e + number, next_) if e > 0 else e + number for e in row] for row in x.tolist()]
    return torch.tensor(rows, dtype=x.dtype)


def normalised(shape: Shape) -> Iterator[Case]:
    c, a = (shape[1],), {"eps": 1e-3, "momentum": 0.3}
    formula = lambda *t: batch_norm(*t, a)  # noqa: E731
    yield Case("batch_norm", (shape, c, c, c, c), formula, a, torch.rand)
    yield Case(
        "batch_norm_grad",
        (shape, shape, c, c, c),
        lambda *t: batch_norm_grad(*t, a),
        {},
        torch.rand,
    )
    yield Case("batch_norm_again", (shape, c, c, c, c), batch_norm_again)


def together(x: Tensor, a: dict[str, Any]) -> Tensor:
    """What is normalised together as rows, so many of each sample."""
    axes = a.get("axes")
    return x.reshape(-1, math.prod(x.shape[-axes:]) if axes else x[0].numel() // a["groups"])


def sample_norm(x: Tensor, *affine: Tensor, a: dict[str, Any]) -> tuple[Tensor, ...]:
    rows = together(x, a)
    mean = rows.mean(1, keepdim=True)
    rstd = 1 / ((rows - mean).square().mean(1, keepdim=True) + a["eps"]).sqrt()
    y = ((rows - mean) * rstd).view(x.shape)
    if "groups" in a:
        affine = tuple(t[(slice(None), *[None] * (x.dim() - 2))] for t in affine)
        kept: Shape = (x.shape[0], a["groups"])
    else:
        kept = (*x.shape[: -a["axes"]], *(1,) * a["axes"])
    for change, t in zip((torch.mul, torch.add), affine, strict=False):
        y = change(y, t)
    return y, mean.view(kept), rstd.view(kept)


def sample_norm_grad(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *weight: Tensor, a: dict[str, Any]
) -> tuple[Tensor, ...]:
    """With any statistics, as if they were right."""
    broadcast = weight[0][(slice(None), *[None] * (x.dim() - 2))] if "groups" in a else weight[0]
    rows, seen = together(x, a), together(dy * broadcast, a)
    normal = (rows - mean.reshape(-1, 1)) * rstd.reshape(-1, 1)
    inside = seen - seen.mean(1, keepdim=True) - normal * (seen * normal).mean(1, keepdim=True)
    axes = [0, *range(2, x.dim())] if "groups" in a else [*range(x.dim() - a["axes"])]
    dweight, dbias = (dy * normal.view(x.shape)).sum(axes), dy.sum(axes)
    return (inside * rstd.reshape(-1, 1)).view(x.shape), dweight, dbias


def sample_norms() -> Iterator[Case]:
    layer, group = {"axes": 2, "eps": 1e-3}, {"groups": 2, "eps": 1e-3}
    for op, x, kept, c, a in [
        ("layer_norm", (5, 3, 4), (5, 1, 1), (3, 4), layer),
        ("group_norm", (3, 4, 2, 5), (3, 2), (4,), group),
    ]:
        for count in range(3):
            formula = lambda *t, a=a: sample_norm(*t, a=a)  # noqa: E731
            yield Case(op, (x, *(c,) * count), formula, a)
        formula = lambda *t, a=a: sample_norm_grad(*t, a=a)  # noqa: E731
        yield Case(f"{op}_grad", (x, x, kept, kept, c), formula, {**a, "affine": 2})


def products() -> Iterator[Case]:
    for ta, tb in itertools.product((False, True), repeat=2):
        shapes = ((5, 3) if ta else (3, 5), (7, 5) if tb else (5, 7))
        letters = f"{'ki' if ta else 'ik'},{'jk' if tb else 'kj'}->ij"
        attrs = {"transpose_a": ta, "transpose_b": tb}
        yield Case("matmul", shapes, lambda a, b, s=letters: torch.einsum(s, a, b), attrs)


def reductions() -> Iterator[Case]:
    for shape, dims, keep in [
        ((2, 3, 4), (1,), False),
        ((2, 3, 4), (0, 2), True),
        ((3,), (0,), False),
    ]:
        a = {"dims": dims, "keepdim": keep}
        count = math.prod(shape[d] for d in dims)

        def total(x: Tensor, dims: Shape = dims, keep: bool = keep) -> Tensor:
            for axis in reversed(dims):
                parts = sum(x.select(axis, i) for i in range(x.shape[axis]))
                x = parts.unsqueeze(axis) if keep else parts
            return x

        yield Case("sum", (shape,), total, a)
        yield Case("mean", (shape,), lambda x, f=total, n=count: f(x) / n, a)


def few(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.randint(-2, 3, shape).to(dtype)


def channels() -> Iterator[Case]:
    for axis, size in enumerate((2, 3, 4)):
        shapes, attrs = ((2, 3, 4), (size,)), {"axis": axis}

        def along(c: Tensor, axis: int = axis) -> Tensor:
            return c[(slice(None), *[None] * (2 - axis))]

        yield Case("add_channel", shapes, lambda x, c, along=along: x + along(c), attrs)
        yield Case("mul_channel", shapes, lambda x, c, along=along: x * along(c), attrs)


def seven(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.tensor(7)


def bytes_of(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(shape)


FLOAT = {"dtype": "float32"}
TO = {"shape": (2, 3, 4)}
CASES = [
    *normalised((2, 3, 4, 5)),
    *normalised((1, 2, 3, 1)),
    *normalised((5, 2)),
    *sample_norms(),
    *products(),
    *reductions(),
    *[
        Case(op, ((2, 3, 4), other), formula)
        for op, formula in [
            ("add", lambda x, y: x + y.expand(2, 3, 4)),
            ("sub", lambda x, y: x - y.expand(2, 3, 4)),
            ("mul", lambda x, y: x * y.expand(2, 3, 4)),
            ("div", lambda x, y: x * y.expand(2, 3, 4) ** -1),
        ]
        for other in [(2, 3, 4), (1,), (), (3, 1), (2, 1, 4), (4,)]
    ],
    Case("add_apart", ((3, 4), (1,)), added_apart, {"step": 0.25, "least": 0.125}),
    Case("apart_grad", ((3, 4), (3, 4), (1,)), lambda dy, z, y: dy * (z - y).clamp(min=0).sign()),
    *channels(),
    Case("affine", ((3, 4),), lambda x: -2.5 * x + 0.75, {"alpha": -2.5, "beta": 0.75}),
    Case("affine", ((),), lambda n: n * 3 + 1, {"alpha": 3, "beta": 1}, seven),
    Case("cast", ((3, 4),), lambda x: 1.0 * x, {"dtype": "float64"}),
    Case("cast", ((3, 4),), lambda x: torch.from_numpy(x.numpy().astype("f4")), FLOAT),
    Case("cast", ((2, 128),), lambda x: torch.arange(256.0).view(2, 128), FLOAT, bytes_of),
    Case("relu", ((3, 4),), lambda x: (x + x.abs()) / 2, {}, few),
    Case("relu_grad", ((3, 4), (3, 4)), lambda dy, y: dy * (y > 0), {}, few),
    Case("sigmoid", ((3, 4),), lambda x: 1 / (1 + (-x).exp())),
    Case("sigmoid_grad", ((3, 4), (3, 4)), lambda dy, y: dy * y - dy * y * y),
    *[Case(name, ((9, 9),), formula, {}, wide) for name, formula in FORMULAS.items()],
    *[slope_of(name) for name in FORMULAS],
    Case("rsqrt", ((5,),), lambda x: (x + 1e-3) ** -0.5, {"eps": 1e-3}, torch.rand),
    Case("sum_to", ((2, 3, 4),), lambda x: x.sum((0, 2)).view(3, 1), {"shape": (3, 1)}),
    Case("sum_to", ((2, 3, 4),), lambda x: x.sum().view(1), {"shape": (1,)}),
    Case("sum_to", ((2, 3),), lambda x: x.sum(), {"shape": ()}),
    Case("broadcast_to", ((3, 1),), lambda x: torch.stack([x.repeat(1, 4)] * 2), TO),
    Case("reshape", ((2, 6),), lambda x: torch.stack(x.flatten().split(4)), {"shape": (3, 4)}),
    Case("permute", ((2, 3, 4),), lambda x: torch.einsum("abc->cab", x), {"dims": (2, 0, 1)}),
    Case("identity", ((3,),), lambda x: x + 0.0),
    Case("own_gradient", ((3,), (2,)), lambda x, other: x + 0.0, {"count": 1, "inputs": 1}),
    Case("space_to_depth", ((2, 3, 4, 6),), lambda x: space_to_depth(x, 2), {"block": 2}),
    Case("depth_to_space", ((2, 18, 2, 1),), lambda x: depth_to_space(x, 3), {"block": 3}),
]


def test_every_op_has_a_case() -> None:
    elsewhere = {op.name for op in (*conv.OPS, *pool.OPS, *scan.OPS, *translate.OPS)}
    assert {case.op for case in CASES} == set(OPS) - elsewhere


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case.shapes}")
def test_meaning(case: Case, check_meaning: Callable[[Case], None]) -> None:
    check_meaning(case)


@pytest.mark.parametrize("op", ["relu", "max_pool2d", "mean", "sigmoid"])
def test_nan_is_not_hidden(op: str) -> None:
    attrs = {
        "max_pool2d": {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0)},
        "mean": {"dims": (2, 3), "keepdim": True},
    }.get(op, {})
    x = torch.randn(1, 1, 2, 2)
    x[0, 0, 1, 0] = torch.nan
    assert OPS[op].evaluate([x], Attrs(attrs))[0].isnan().any()


def test_relu_grad_passes_where_the_result_is_nan_as_in_torch() -> None:
    x = torch.tensor([torch.nan, -1.0, 0.0, 2.0], requires_grad=True)
    dy = torch.tensor([3.0, 4.0, 5.0, 6.0])
    torch.relu(x).backward(dy)
    (dx,) = OPS["relu_grad"].evaluate([dy, torch.relu(x.detach())], Attrs())
    assert torch.equal(dx, x.grad)


@pytest.mark.parametrize(("channels", "in_rows"), [(4, True), (8, False)])
def test_a_weight_gradient_that_torch_writes_beyond_is_computed_in_rows(
    channels, in_rows, monkeypatch
):
    """Torch's heap is damaged otherwise, in eager too (filters of 1x1, stride 2, channels_last)."""
    seen, real = [], conv.convolution_backward

    def noted(dy, x, w, attrs, mask):
        seen.append((dy.is_contiguous(), x.is_contiguous()))
        return real(dy, x, w, attrs, mask)

    monkeypatch.setattr(conv, "convolution_backward", noted)
    x = torch.randn(3, channels, 8, 8).contiguous(memory_format=torch.channels_last)
    dy = torch.randn(3, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    attrs = Attrs({
        "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "groups": 1,
        "shape": (8, channels, 1, 1),
    })  # fmt: skip
    (dw,) = OPS["conv2d_wgrad"].evaluate((dy, x), attrs)
    expected = torch.einsum("nohw,nchw->oc", dy, x[..., ::2, ::2])
    torch.testing.assert_close(dw[:, :, 0, 0], expected, rtol=1e-4, atol=1e-4)
    assert seen == [(in_rows, in_rows)]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("size", [3, 5, 7])
def test_taps_that_meet_padding_alone_have_no_gradient(layout, size):
    """torch left them as the memory was (bfloat16, CPU)."""
    shape = (128, 64, size, size)
    attrs = Attrs(stride=(2, 2), padding=(size // 2,) * 2, dilation=(1, 1), groups=1, shape=shape)
    held = [torch.full(shape, 3e4, dtype=torch.bfloat16) for _ in range(8)]
    del held  # what is allocated next is likely there
    dy, x = (torch.randn(2, channels, 1, 1).bfloat16() for channels in (128, 64))
    dy, x = (
        t.as_strided(t.shape, torch.empty(t.shape, memory_format=layout).stride()) for t in (dy, x)
    )
    (dw,) = OPS["conv2d_wgrad"].evaluate((dy, x), attrs)
    exact = torch.zeros(shape, dtype=torch.float64)
    exact[:, :, size // 2, size // 2] = torch.einsum("nkij,ncij->kc", dy.double(), x.double())
    torch.testing.assert_close(dw.double(), exact, rtol=1e-2, atol=1e-2)
