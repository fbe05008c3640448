"""Random networks, of which each seed gives another."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from plantune.layers import SpaceToDepth


def scalar(rng: random.Random) -> nn.Parameter:
    return nn.Parameter(torch.tensor([rng.choice((-1, 1)) * rng.uniform(0.5, 1.5)]))


class ConvUnit(nn.Module):
    """A convolution of any kind, with some of: batch norm, scalars, ReLU."""

    def __init__(self, rng: random.Random, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        size = rng.choice((1, 3, 3))
        dilation = rng.choice((1, 1, 2)) if size == 3 and stride == 1 else 1
        groups = rng.choice([g for g in (1, 1, 1, 2, inputs) if inputs % g == outputs % g == 0])
        padding = dilation * (size // 2)
        self.conv = nn.Conv2d(
            inputs, outputs, size, stride, padding, dilation, groups, bias=rng.random() < 0.5
        )
        self.bn = nn.BatchNorm2d(outputs) if rng.random() < 0.6 else nn.Identity()
        self.scale = scalar(rng) if rng.random() < 0.4 else None
        self.bias = scalar(rng) if rng.random() < 0.4 else None
        self.relu = nn.ReLU() if rng.random() < 0.6 else nn.Identity()
        self.offset = scalar(rng) if rng.random() < 0.3 else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.bn(self.conv(x))
        y = y if self.scale is None else y * self.scale
        y = y if self.bias is None else y + self.bias
        y = y if residual is None else y + residual
        y = self.relu(y)
        return y if self.offset is None else y + self.offset


class Residual(nn.Module):
    """Two units and the identity, which may be pooled and projected, and may pass a ReLU."""

    def __init__(self, rng: random.Random, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.before = scalar(rng)
        self.first = ConvUnit(rng, inputs, outputs, stride)
        self.second = ConvUnit(rng, outputs, outputs)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.down = nn.Sequential(
                nn.AvgPool2d(3, stride, 1, count_include_pad=rng.random() < 0.5),
                nn.Conv2d(inputs, outputs, 1, bias=rng.random() < 0.5),
            )

    def forward(self, x: Tensor) -> Tensor:
        biased = x + self.before
        return self.second(self.first(biased), self.down(biased))


class Gate(nn.Module):
    """Squeeze and excite, with a residual and a ReLU behind it or not."""

    def __init__(self, rng: random.Random, channels: int) -> None:
        super().__init__()
        self.down = nn.Linear(channels, 5, bias=rng.random() < 0.7)
        self.up = nn.Linear(5, channels, bias=rng.random() < 0.7)
        self.keepdim = rng.random() < 0.5
        self.residual = rng.random() < 0.5
        self.offset = scalar(rng) if rng.random() < 0.5 else None

    def forward(self, x: Tensor) -> Tensor:
        n, c = x.shape[:2]
        pooled = x.mean((2, 3), keepdim=self.keepdim).view(n, c)
        y = x * torch.sigmoid(self.up(torch.relu(self.down(pooled)))).view(n, c, 1, 1)
        y = torch.relu(y + x) if self.residual else y
        return y if self.offset is None else y + self.offset


class Arithmetic(nn.Module):
    """Pointwise ops with numbers, scalars, and a value that is read twice."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.scale, self.bias = scalar(rng), scalar(rng)
        self.number = rng.uniform(0.5, 2)
        self.twice = rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(x * self.scale) - self.number * x
        return (y + self.bias) * x if self.twice else y / self.number + self.bias


class Scaled(nn.Module):
    """Images of fewer digits, which are cast and scaled."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("size", torch.rand(channels, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x.half().to(self.size.dtype) * 0.7 / self.size


class Twice(nn.Module):
    """What it is given and a function of it, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.cat((x, x.sigmoid()), 1))


class Attending(nn.Module):
    """Scores of a row's numbers for each other, and what they weigh."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(1, (1, -1, 1))
        scores = rows @ rows.sigmoid().transpose(-2, -1) * 0.5
        weighed = scores.softmax(-1) @ torch.relu(rows)
        return weighed.permute(0, 2, 1, 3).reshape(x.shape)


class Rolled(nn.Module):
    """Numbers moved and turned, as windows are taken from an image."""

    def forward(self, x: Tensor) -> Tensor:
        image = torch.relu(x.unflatten(1, (1, -1, 1)))
        return image.roll(1, 2).transpose(2, 3).roll(2, 3).reshape(x.shape) + x


# Networks of these seeds end with a function or a norm that the others do not have.
LASTS = dict(
    enumerate(
        (
            nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.ELU(), nn.Softplus(), nn.Tanh(),
            nn.ReLU6(), nn.Hardtanh(), nn.Hardswish(), nn.Hardsigmoid(),
            *map(nn.LeakyReLU, (0.01, 0.1, 0.2)),
            *(nn.Sequential(nn.LayerNorm(5), last) for last in (nn.ReLU(), nn.GELU(), nn.SiLU())),
            *(nn.Sequential(nn.GroupNorm(1, 5), last) for last in (nn.ReLU(), nn.GELU())),
        )
    )
)  # fmt: skip
LASTS |= {seed: nn.Sequential(nn.Tanh(), nn.Softmax(-1)) for seed in (19, 20)}
LASTS |= {seed: Twice() for seed in (21, 22)}
LASTS |= {23: Attending(), 24: Rolled()}


class RandomNetwork(nn.Module):
    """Some blocks, then a head; a middle value may leave beside the last one."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        channels = self.channels = rng.choice((2, 3, 4))
        self.size = rng.choice((6, 8))
        size, blocks = self.size, []
        if (channels, size) == (3, 8):
            blocks.append(Scaled(channels))
        if rng.random() < 0.3:
            blocks.append(SpaceToDepth(2))
            channels, size = 4 * channels, size // 2
        for _ in range(rng.randint(1, 3)):
            kind = rng.choice(("unit", "unit", "residual", "gate", "arithmetic", "pool"))
            stride, outputs = rng.choice((1, 2)), rng.choice((channels, 4, 6, 8))
            if kind == "unit":
                blocks.append(ConvUnit(rng, channels, outputs, stride))
            elif kind == "residual":
                blocks.append(Residual(rng, channels, outputs, stride))
            else:
                blocks.append(self._other(rng, kind, channels))
                stride, outputs = (2 if kind == "pool" else 1), channels
            channels, size = outputs, -(-size // stride)
        self.blocks = nn.ModuleList(blocks)
        self.middle = rng.randrange(len(blocks)) if rng.random() < 0.4 else None
        pooled = rng.random() < 0.7
        self.pool = nn.AdaptiveAvgPool2d((1, 1)) if pooled else nn.Identity()
        self.by_pixels = not pooled and channels % 2 == 0
        self.head = nn.Linear(channels if pooled else channels * size * size, 5)
        self.last = rng.choice((nn.ReLU(), nn.Sigmoid(), nn.Identity()))

    @staticmethod
    def _other(rng: random.Random, kind: str, channels: int) -> nn.Module:
        if kind == "gate":
            return Gate(rng, channels)
        if kind == "arithmetic":
            return Arithmetic(rng)
        return rng.choice((nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1)))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        middle = None
        for index, block in enumerate(self.blocks):
            x = block(x)
            middle = x if index == self.middle else middle
        x = self.pool(x)
        flat = x.flatten(2).transpose(1, 2).flatten(1) if self.by_pixels else x.flatten(1)
        y = self.last(self.head(flat))
        return y if middle is None else (middle, y)


def randomise(module: nn.Module, seed: int) -> nn.Module:
    """Weights, statistics and scalars without which every result would be another."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if not tensor.is_floating_point():
                continue
            normal = torch.randn(tensor.shape, generator=generator)
            uniform = torch.rand(tensor.shape, generator=generator) + 0.5
            if tensor.dim() > 1:
                tensor.copy_(normal * (1.5 / tensor[0].numel()) ** 0.5)
            elif "var" in name or name.endswith(("bn.weight", "scale")):
                tensor.copy_(uniform)
            else:
                tensor.copy_(uniform * normal.sign() * 0.5)
    return module
