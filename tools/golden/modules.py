"""A dozen small modules, each a factory that a workload names by this file."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune.layers import EpisodicGRU


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        layers = [nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)]
        super().__init__(*layers)


class ConvBlock(nn.Module):
    """A residual block with batch norms, whose shortcut has a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.two, self.other = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.short = nn.Conv2d(8, 16, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.other(self.two(F.relu(self.norm(self.one(x)))))
        return F.relu(y + self.short(x))


class Policy(nn.Module):
    """Images of bytes, pools, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 16, 3), nn.Linear(16 * 9, 32)
        self.actions, self.value = nn.Linear(32, 6), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)
        y = F.hardswish(self.fc(y))
        return self.actions(y).log_softmax(-1), self.value(y).squeeze(-1)


class Depthwise(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(16, 32, 1),
            nn.BatchNorm2d(32),
            nn.ReLU6(),
            nn.Conv2d(32, 32, 3, padding=1, groups=32),
            nn.SiLU(),
            nn.Conv2d(32, 16, 3, padding=1, groups=4),
            nn.AdaptiveAvgPool2d(1),
        )


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.group = nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.layer, self.out = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.group(self.conv(x))).mean((2, 3))
        return self.out(self.layer(y)).softmax(-1)


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(64, 4, 128, dropout=0.0, batch_first=True)


class Dropped(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 32), nn.Linear(32, 50)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids).cumsum(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(32, 64, batch_first=True), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(x)[0][:, -1])


class Episodes(nn.Module):
    """A memory that is emptied where an episode ends."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = EpisodicGRU(32, 128)

    def forward(self, x: Tensor, done: Tensor) -> Tensor:
        return self.gru(x, None, done)[0]


class Branches(nn.Module):
    """Values that are joined, split, sliced and permuted."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.left(x), self.right(x), x[:, :4]], 1)
        one, two = y.split([12, 8], 1)
        return one.permute(0, 2, 3, 1).matmul(two.flatten(2).transpose(1, 2)[:, None, :12])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


# What each is called with.
INPUTS: dict[str, tuple[str, ...]] = {
    "Mlp": ("4x24",),
    "ConvBlock": ("2x8x12x12",),
    "Policy": ("2x3x8x8",),
    "Depthwise": ("2x16x10x10",),
    "Norms": ("3x8x6x6",),
    "Encoder": ("2x5x64",),
    "Dropped": ("8x16",),
    "Words": ("2x7:int64",),
    "Recurrent": ("3x6x32",),
    "Episodes": ("5x2x32", "5x2:bool"),
    "Branches": ("2x8x6x6",),
    "Attention": ("2x10x32",),
}
