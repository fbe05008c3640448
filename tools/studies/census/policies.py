"""Two policies of reinforcement learning: what an actor calls, with the images that it sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

ACTIONS = 18


class Policy(nn.Module):
    """What it sees as 512 or so numbers, which a head of actions and one of values read."""

    def __init__(self, body: nn.Sequential, width: int) -> None:
        super().__init__()
        self.body, self.actions, self.value = body, nn.Linear(width, ACTIONS), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.actions.weight
        seen = self.body(x if x.is_floating_point() else x.to(weight.dtype) / 255)
        return self.actions(seen), self.value(seen)


def nature() -> Policy:
    """Of "Human-level control through deep reinforcement learning" (2015)."""
    body = nn.Sequential(
        *(nn.Conv2d(4, 32, 8, stride=4), nn.ReLU()),
        *(nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(64 * 7 * 7, 512), nn.ReLU()),
    )
    return Policy(body, 512)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x.relu()).relu())


def impala() -> Policy:
    """The large network of "IMPALA" (2018), without its memory, for images of 64x64."""
    body = nn.Sequential()
    width = 3
    for wide in (16, 32, 32):
        convolution = nn.Conv2d(width, wide, 3, padding=1)
        body.extend([convolution, nn.MaxPool2d(3, 2, 1), Residual(wide), Residual(wide)])
        width = wide
    body.extend([nn.ReLU(), nn.Flatten(), nn.Linear(width * 8 * 8, 256), nn.ReLU()])
    return Policy(body, 256)


POLICIES: Mapping[str, Callable[[], Policy]] = {"nature": nature, "impala": impala}


def images(name: str) -> Tensor:
    """As its actors bring them."""
    if name == "nature":
        return torch.randint(0, 256, (256, 4, 84, 84), dtype=torch.uint8)
    return torch.randn(512, 3, 64, 64)
