"""Blocks as people write them, with any norm, of any size down to one pixel."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

CHANNELS = (4, 8, 16, 32, 64)
IMAGES = (1, 1, 2, 3, 4, 7, 8, 14)
# So many elements at most, of an image that a block reads.
MOST = 1 << 14

Made = tuple[nn.Module, tuple[int, ...]]


class LayerNorm2d(nn.LayerNorm):
    """Of the channels of each pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def norm_of(rng: random.Random, channels: int, kinds: str = "batch batch group layer") -> nn.Module:
    kind = rng.choice(kinds.split())
    if kind == "batch":
        return nn.BatchNorm2d(channels, momentum=rng.choice((0.1, 0.1, 0.01)))
    if kind == "layer":
        return LayerNorm2d(channels)
    return nn.GroupNorm(rng.choice([g for g in (1, 2, 4, 8, 32) if channels % g == 0]), channels)


class Residual(nn.Module):
    """ResNet's basic block or its bottleneck, with the norm of one kind."""

    def __init__(self, rng: random.Random, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        kind = rng.choice(("batch", "batch", "group", "layer"))
        deep = rng.random() < 0.3
        middle = max(outputs // 4, 2) if deep else outputs
        sizes = (1, 3, 1) if deep else (3, 3)
        widths = (inputs, *(middle for _ in sizes[1:]), outputs)
        bias = rng.random() < 0.2
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for at, size in enumerate(sizes):
            step = stride if at == len(sizes) - 2 else 1
            conv = nn.Conv2d(*widths[at : at + 2], size, step, size // 2, bias=bias)
            self.convs.append(conv)
            self.norms.append(norm_of(rng, widths[at + 1], kind))
        self.down: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.down = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm_of(rng, outputs, kind)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for at, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = torch.relu(y) if at < len(self.convs) - 1 else y
        return torch.relu(y + self.down(x))


class Excited(nn.Module):
    """A convolution whose channels are weighed by a squeeze and excite."""

    def __init__(self, rng: random.Random, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = norm_of(rng, channels)
        self.down, self.up = nn.Linear(channels, 4), nn.Linear(4, channels)
        self.scale, self.shift = (nn.Parameter(torch.ones(1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)) * self.scale + self.shift
        gate = torch.sigmoid(self.up(torch.relu(self.down(y.mean((2, 3))))))
        return torch.relu(y * gate[:, :, None, None] + x)


class ConvNeXt(nn.Module):
    def __init__(self, rng: random.Random, channels: int) -> None:
        super().__init__()
        size = rng.choice((3, 7))
        self.conv = nn.Conv2d(channels, channels, size, padding=size // 2, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(functional.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


def _image(rng: random.Random, channels: int, least: int) -> tuple[int, ...]:
    size = rng.choice(IMAGES)
    batch = rng.choice((1, 2, 2, 3, 4, 8, 16))
    while batch > least and batch * channels * size * size > MOST:
        batch //= 2
    return max(batch, least), channels, size, size


def residual(rng: random.Random, least: int) -> Made:
    inputs = rng.choice(CHANNELS)
    outputs, stride = rng.choice((inputs, 2 * inputs)), rng.choice((1, 1, 2))
    return Residual(rng, inputs, outputs, stride), _image(rng, inputs, least)


def normed(rng: random.Random, least: int) -> Made:
    """A convolution of any kind, a norm, an activation."""
    inputs, outputs = rng.choice((3, *CHANNELS)), rng.choice(CHANNELS)
    size, stride = rng.choice((1, 3, 3, 5)), rng.choice((1, 1, 2))
    groups = inputs if rng.random() < 0.2 and outputs % inputs == 0 else 1
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups)
    last = rng.choice((nn.ReLU(), nn.SiLU(), nn.Hardswish(), nn.Identity()))
    return nn.Sequential(conv, norm_of(rng, outputs), last), _image(rng, inputs, least)


def alone(rng: random.Random, least: int) -> Made:
    """A norm without anything, or after a ReLU."""
    channels = rng.choice(CHANNELS)
    first = rng.choice((nn.Identity(), nn.ReLU()))
    return nn.Sequential(first, norm_of(rng, channels)), _image(rng, channels, least)


def network(rng: random.Random, least: int) -> Made:
    """A small classifier."""
    width = rng.choice(CHANNELS[:3])
    layers = [nn.Conv2d(3, width, 3, padding=1, bias=False), norm_of(rng, width), nn.ReLU()]
    for _ in range(rng.randint(1, 2)):
        layers.append(Residual(rng, width, width * 2, rng.choice((1, 2))))
        width *= 2
    pool = rng.choice((nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1)))
    layers += [pool, nn.Flatten(), nn.Linear(width, rng.choice((1, 5, 10)))]
    return nn.Sequential(*layers), _image(rng, 3, least)


def layers(rng: random.Random, least: int) -> Made:
    """Linear layers with norms between them, down to one number out."""
    widths = [rng.choice((1, 3, 8, 16, 64)) for _ in range(rng.randint(2, 4))]
    widths[0] = max(widths[0], 3)
    found: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        found.append(nn.Linear(inputs, outputs, bias=rng.random() < 0.8))
        found += [rng.choice((nn.LayerNorm(outputs), nn.BatchNorm1d(outputs), nn.Identity()))]
        found += [rng.choice((nn.ReLU(), nn.Tanh(), nn.GELU(), nn.Identity()))]
    return nn.Sequential(*found), (max(least, rng.choice((1, 2, 3, 8, 32))), widths[0])


def excited(rng: random.Random, least: int) -> Made:
    channels = rng.choice(CHANNELS)
    return Excited(rng, channels), _image(rng, channels, least)


def convnext(rng: random.Random, least: int) -> Made:
    channels = rng.choice(CHANNELS)
    return ConvNeXt(rng, channels), _image(rng, channels, least)


KINDS: dict[str, Callable[[random.Random, int], Made]] = {
    "residual": residual,
    "normed": normed,
    "alone": alone,
    "network": network,
    "layers": layers,
    "excited": excited,
    "convnext": convnext,
}
