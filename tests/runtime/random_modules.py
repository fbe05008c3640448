"""Small networks whose layers, shapes and results are drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Op = Callable[..., Tensor]
MOST_ELEMENTS = 4096


class Drawn(nn.Module):
    """Each step makes a value of earlier ones; some values are results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.steps: list[tuple[Op | int, tuple[int, ...]]] = []
        self.results: list[int] = []

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for op, read in self.steps:
            call = self.layers[op] if isinstance(op, int) else op
            values.append(call(*[values[at] for at in read]))
        return tuple(values[at] for at in self.results)


class _Drawing:
    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.module = Drawn()
        batch = self.pick.choice((1, 2, 3))
        shape = (batch, self.pick.choice((1, 3, 4)), *self.pick.choice(((6, 6), (5, 8), (4, 1))))
        self.values = [torch.randn(shape)]

    def add(self, op: Op | nn.Module, *read: int) -> None:
        step: Op | int = op
        if isinstance(op, nn.Module):
            self.module.layers.append(op)
            step = len(self.module.layers) - 1
        with torch.no_grad():
            made = op(*[self.values[at] for at in read])
        if 0 < made.numel() <= MOST_ELEMENTS:
            self.module.steps.append((step, read))
            self.values.append(made)

    def step(self) -> None:
        at = self.pick.randrange(max(len(self.values) - 3, 0), len(self.values))
        x = self.values[at]
        kinds = {2: ROWS, 3: TOKENS, 4: IMAGES}.get(x.dim(), ()) + ANY
        self.pick.choice(kinds)(self, at, x)


def drawn(seed: int, steps: int = 8) -> tuple[Drawn, Tensor]:
    """A network and an image for it; it returns what it made last and up to two values before."""
    torch.manual_seed(seed)
    made = _Drawing(seed)
    made.add(nn.Conv2d(made.values[0].shape[1], 6, 1), 0)
    while len(made.values) < steps + 2:
        made.step()
    last = len(made.values) - 1
    others = made.pick.sample(range(1, last), made.pick.randrange(3))
    made.module.results = [last, *sorted(others)]
    return made.module, made.values[0]


def _conv(d: _Drawing, at: int, x: Tensor) -> None:
    channels, sides = x.shape[1], (3, 1, 5)
    side = next((s for s in d.pick.sample(sides, 3) if min(x.shape[2:]) + s // 2 * 2 >= s), 1)
    groups = d.pick.choice((1, 1, channels))
    made = groups * d.pick.choice((1, 2)) if groups > 1 else d.pick.choice((1, 4, 8))
    stride = d.pick.choice((1, 1, 2))
    d.add(nn.Conv2d(channels, made, side, stride, side // 2, groups=groups), at)


def _norm(d: _Drawing, at: int, x: Tensor) -> None:
    groups = next(g for g in (4, 3, 2, 1) if x.shape[1] % g == 0)
    kinds = (nn.BatchNorm2d(x.shape[1]), nn.GroupNorm(groups, x.shape[1]))
    if x.numel() // x.shape[1] > 1 and x[0].numel() > groups:
        d.add(d.pick.choice(kinds), at)


def _pool(d: _Drawing, at: int, x: Tensor) -> None:
    kinds = (nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, 1, 1), nn.AdaptiveAvgPool2d(1))
    d.add(d.pick.choice(kinds), at)


def _permute(d: _Drawing, at: int, x: Tensor) -> None:
    dims = d.pick.sample(range(x.dim()), x.dim())
    d.add(lambda x: x.permute(dims), at)


def _slice(d: _Drawing, at: int, x: Tensor) -> None:
    axis = d.pick.randrange(x.dim())
    d.add(lambda x: x.narrow(axis, 0, max(x.shape[axis] // 2, 1)), at)


def _flatten(d: _Drawing, at: int, x: Tensor) -> None:
    d.add(d.pick.choice((lambda x: x.flatten(1), lambda x: x.flatten(2).transpose(1, 2))), at)


def _two(d: _Drawing, at: int, x: Tensor) -> None:
    alike = [n for n, y in enumerate(d.values) if y.shape == x.shape]
    other, axis = d.pick.choice(alike), d.pick.randrange(x.dim())
    kinds: tuple[Op, ...] = (torch.add, torch.mul, lambda x, y: torch.cat([x, y], axis))
    d.add(d.pick.choice(kinds), at, other)


def _pointwise(d: _Drawing, at: int, x: Tensor) -> None:
    d.add(d.pick.choice((torch.relu, torch.sigmoid, F.gelu, F.silu, lambda x: x * 0.5)), at)


def _upsample(d: _Drawing, at: int, x: Tensor) -> None:
    d.add(lambda x: F.interpolate(x, scale_factor=2.0), at)


def _contiguous(d: _Drawing, at: int, x: Tensor) -> None:
    d.add(lambda x: x.contiguous(), at)


def _linear(d: _Drawing, at: int, x: Tensor) -> None:
    d.add(nn.Linear(x.shape[-1], d.pick.choice((1, 4, 6))), at)


def _layer_norm(d: _Drawing, at: int, x: Tensor) -> None:
    if x.shape[-1] > 2:
        d.add(nn.LayerNorm(x.shape[-1]), at)


def _softmax(d: _Drawing, at: int, x: Tensor) -> None:
    axis = d.pick.randrange(x.dim())
    d.add(lambda x: x.softmax(axis), at)


def _attention(d: _Drawing, at: int, x: Tensor) -> None:
    d.add(lambda x: F.scaled_dot_product_attention(x, x, x), at)


def _fold(d: _Drawing, at: int, x: Tensor) -> None:
    d.add(lambda x: x.unsqueeze(1), at)


def _reduce(d: _Drawing, at: int, x: Tensor) -> None:
    axis, kept = d.pick.randrange(x.dim()), d.pick.choice((True, False))
    if x.dim() > 2:
        d.add(lambda x: x.mean(axis, keepdim=kept), at)


Kinds = tuple[Callable[[_Drawing, int, Tensor], Any], ...]
ANY: Kinds = (_permute, _pointwise, _pointwise, _two, _two, _slice, _contiguous, _linear, _softmax)
ANY += (_reduce,)
IMAGES: Kinds = (_conv, _conv, _conv, _norm, _norm, _pool, _flatten, _upsample, _attention)
TOKENS: Kinds = (_layer_norm, _attention, _fold, _flatten)
ROWS: Kinds = (_layer_norm, _linear)
