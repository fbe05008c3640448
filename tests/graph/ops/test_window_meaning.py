"""What convolutions, pools and their gradients compute, against plain loops in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from plantune.graph.ops import conv, pool

Shape = tuple[int, ...]


def conv_attrs(stride: Shape, padding: Shape, dilation: Shape = (1, 1), groups: int = 1) -> Any:
    return {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


def taps(padded: Tensor, kernel: Shape, out: Shape, a: dict[str, Any]) -> Iterator[Any]:
    """Each place of a window, with a view of the pixels under it, one per output pixel."""
    (sh, sw), (dh, dw) = a["stride"], a.get("dilation", (1, 1))
    for i, j in itertools.product(*map(range, kernel)):
        rows = slice(i * dh, i * dh + sh * (out[0] - 1) + 1, sh)
        columns = slice(j * dw, j * dw + sw * (out[1] - 1) + 1, sw)
        yield i, j, padded[:, :, rows, columns]


def bordered(x: Tensor, padding: Shape, value: float = 0.0) -> Tensor:
    n, c, h, w = x.shape
    out = x.new_full((n, c, h + 2 * padding[0], w + 2 * padding[1]), value)
    inner(out, padding, (h, w)).copy_(x)
    return out


def inner(padded: Tensor, padding: Shape, size: Shape) -> Tensor:
    return padded[:, :, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]


def convolve(x: Tensor, w: Tensor, out: Shape, a: dict[str, Any]) -> Tensor:
    groups = a["groups"]
    w = w.view(groups, -1, *w.shape[1:])
    y = torch.zeros(x.shape[0], groups, w.shape[1], *out, dtype=x.dtype)
    for i, j, pixels in taps(bordered(x, a["padding"]), tuple(w.shape[3:]), out, a):
        grouped = pixels.reshape(x.shape[0], groups, -1, *out)
        y += torch.einsum("ngchw,goc->ngohw", grouped, w[..., i, j])
    return y.flatten(1, 2)


def dgrad(dy: Tensor, w: Tensor, a: dict[str, Any]) -> Tensor:
    n, c, h, wide = a["shape"]
    dx = bordered(torch.zeros(n, c, h, wide, dtype=dy.dtype), a["padding"])
    groups, out = a["groups"], tuple(dy.shape[2:])
    w = w.view(groups, -1, *w.shape[1:])
    dy = dy.view(n, groups, -1, *out)
    for i, j, pixels in taps(dx, tuple(w.shape[3:]), out, a):
        pixels.add_(torch.einsum("ngohw,goc->ngchw", dy, w[..., i, j]).flatten(1, 2))
    return inner(dx, a["padding"], (h, wide))


def wgrad(dy: Tensor, x: Tensor, a: dict[str, Any]) -> Tensor:
    groups, out = a["groups"], tuple(dy.shape[2:])
    dw = torch.zeros(a["shape"], dtype=dy.dtype).view(groups, -1, *a["shape"][1:])
    dy = dy.view(dy.shape[0], groups, -1, *out)
    for i, j, pixels in taps(bordered(x, a["padding"]), a["shape"][2:], out, a):
        grouped = pixels.reshape(x.shape[0], groups, -1, *out)
        dw[..., i, j] = torch.einsum("ngohw,ngchw->goc", dy, grouped)
    return dw.view(a["shape"])


def pooled(a: dict[str, Any], size: Shape) -> Shape:
    return tuple(
        (n + 2 * p - k) // s + 1
        for n, p, k, s in zip(size, a["padding"], a["kernel"], a["stride"], strict=True)
    )


def counts(a: dict[str, Any], size: Shape) -> Tensor:
    """By how many pixels each window's sum is divided."""
    edge = 1.0 if a["count_padding"] else 0.0
    ones = bordered(torch.ones(1, 1, *size, dtype=torch.float64), a["padding"], edge)
    return sum(p for _, _, p in taps(ones, a["kernel"], pooled(a, size), a))


def avg_pool(x: Tensor, a: dict[str, Any]) -> Tensor:
    size = tuple(x.shape[2:])
    places = taps(bordered(x, a["padding"]), a["kernel"], pooled(a, size), a)
    return sum(p for _, _, p in places) / counts(a, size)


def avg_pool_grad(dy: Tensor, a: dict[str, Any]) -> Tensor:
    size = a["shape"][2:]
    dx = bordered(torch.zeros(a["shape"], dtype=dy.dtype), a["padding"])
    for _, _, pixels in taps(dx, a["kernel"], tuple(dy.shape[2:]), a):
        pixels.add_(dy / counts(a, size))
    return inner(dx, a["padding"], size)


def max_pool(x: Tensor, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Window by window; the first of equals wins."""
    h, w = x.shape[2:]
    y = x.new_empty(*x.shape[:2], *pooled(a, (h, w)))
    places = torch.empty(y.shape, dtype=torch.int64)
    for n, c, p, q in itertools.product(*map(range, y.shape)):
        top, left = (
            at * s - pad for at, s, pad in zip((p, q), a["stride"], a["padding"], strict=True)
        )
        window = [
            (x[n, c, i, j].item(), -(i * w + j))
            for i in range(max(top, 0), min(top + a["kernel"][0], h))
            for j in range(max(left, 0), min(left + a["kernel"][1], w))
        ]
        best, place = max(window)
        y[n, c, p, q], places[n, c, p, q] = best, -place
    return y, places


def taps_in(places: Tensor, width: int, a: dict[str, Any]) -> Tensor:
    """Window by window, what its place is within it."""
    found = torch.empty(places.shape, dtype=torch.uint8)
    for n, c, p, q in itertools.product(*map(range, places.shape)):
        row, column = divmod(int(places[n, c, p, q]), width)
        row -= p * a["stride"][0] - a["padding"][0]
        column -= q * a["stride"][1] - a["padding"][1]
        assert 0 <= row < a["kernel"][0]
        assert 0 <= column < a["kernel"][1]
        found[n, c, p, q] = row * a["kernel"][1] + column
    return found


def max_pool_taps(x: Tensor, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    y, places = max_pool(x, a)
    return y, taps_in(places, x.shape[3], a)


def max_pool_taps_grad(dy: Tensor, taps: Tensor, a: dict[str, Any]) -> Tensor:
    dx = torch.zeros(a["shape"], dtype=dy.dtype)
    for n, c, p, q in itertools.product(*map(range, dy.shape)):
        row, column = divmod(int(taps[n, c, p, q]), a["kernel"][1])
        row += p * a["stride"][0] - a["padding"][0]
        column += q * a["stride"][1] - a["padding"][1]
        dx[n, c, row, column] += dy[n, c, p, q]
    return dx


def max_pool_grad(dy: Tensor, places: Tensor, a: dict[str, Any]) -> Tensor:
    dx = torch.zeros(a["shape"], dtype=dy.dtype)
    for n, c, p, q in itertools.product(*map(range, dy.shape)):
        place = int(places[n, c, p, q])
        dx[n, c, place // a["shape"][3], place % a["shape"][3]] += dy[n, c, p, q]
    return dx


@dataclass(frozen=True)
class Case:
    op: str
    shapes: tuple[Shape, ...]
    formula: Callable[..., Any]
    attrs: dict[str, Any] = field(default_factory=dict)
    draw: Callable[..., Tensor] = torch.randn
    """How the last input is drawn."""


def images(shape: Shape, weight: Shape, **attrs: Any) -> Iterator[Case]:
    """A convolution and its two gradients at one geometry."""
    a = conv_attrs(**attrs)
    sizes = zip(shape[2:], weight[2:], a["stride"], a["padding"], a["dilation"], strict=True)
    out = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)
    dy = (shape[0], weight[0], *out)
    x_attrs, w_attrs = {**a, "shape": shape}, {**a, "shape": weight}
    yield Case("conv2d", (shape, weight), lambda x, w: convolve(x, w, out, a), a)
    yield Case("conv2d_dgrad", (dy, weight), lambda g, w: dgrad(g, w, x_attrs), x_attrs)
    yield Case("conv2d_wgrad", (dy, shape), lambda g, x: wgrad(g, x, w_attrs), w_attrs)


def pools(shape: Shape, kernel: Shape, stride: Shape, padding: Shape) -> Iterator[Case]:
    window = {"kernel": kernel, "stride": stride, "padding": padding}
    dy = (*shape[:2], *pooled(window, shape[2:]))
    for count in (True, False):
        a = {**window, "count_padding": count}
        g = {**a, "shape": shape}
        yield Case("avg_pool2d", (shape,), lambda x, a=a: avg_pool(x, a), a)
        yield Case("avg_pool2d_grad", (dy,), lambda dy, g=g: avg_pool_grad(dy, g), g)
    g = {**window, "shape": shape}
    # A few whole numbers only: equals are in most windows.
    yield Case("max_pool2d", (shape,), lambda x: max_pool(x, window), window, few)
    yield Case("max_pool2d_grad", (dy, dy), lambda d, p: max_pool_grad(d, p, g), g, pixel(shape))
    yield Case("max_pool2d_taps", (shape,), lambda x: max_pool_taps(x, window), window, few)
    taps = winners(shape, window)
    yield Case("max_pool2d_taps_grad", (dy, dy), lambda d, t: max_pool_taps_grad(d, t, g), g, taps)


def few(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.randint(-2, 3, shape).to(dtype)


def winners(image: Shape, window: dict[str, Any]) -> Callable[..., Tensor]:
    """Taps that are inside of the image."""
    return lambda shape, dtype: max_pool_taps(torch.randn(image), window)[1]


def pixel(image: Shape) -> Callable[..., Tensor]:
    return lambda shape, dtype: torch.randint(0, image[2] * image[3], shape)


CASES = [
    *images((2, 3, 7, 5), (4, 3, 3, 3), stride=(1, 1), padding=(1, 1)),
    *images((1, 2, 8, 7), (3, 2, 3, 3), stride=(2, 2), padding=(1, 1)),
    *images((2, 5, 4, 4), (3, 5, 1, 1), stride=(1, 1), padding=(0, 0)),
    *images((2, 2, 5, 6), (3, 2, 1, 1), stride=(2, 2), padding=(0, 0)),
    *images((1, 2, 9, 8), (2, 2, 2, 3), stride=(3, 2), padding=(0, 2), dilation=(2, 3)),
    *images((2, 4, 5, 5), (6, 2, 3, 3), stride=(2, 1), padding=(1, 0), groups=2),
    *images((1, 3, 4, 4), (3, 1, 3, 3), stride=(1, 1), padding=(1, 1), groups=3),
    *pools((2, 3, 7, 6), (3, 3), (2, 2), (1, 1)),
    *pools((1, 1, 5, 8), (2, 3), (3, 2), (0, 1)),
    *pools((2, 2, 4, 4), (1, 1), (2, 2), (0, 0)),
    *pools((1, 2, 3, 3), (3, 3), (3, 3), (0, 0)),
]


def test_every_op_has_a_case() -> None:
    assert {case.op for case in CASES} == {op.name for op in (*conv.OPS, *pool.OPS)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case.shapes}")
def test_meaning(case: Case, check_meaning: Callable[[Case], None]) -> None:
    check_meaning(case)
