"""A small network for the backend, and what its tests ask of compiled ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune.backend import pieces

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A bias before a norm has a gradient of rounding errors, which AdamW would magnify.
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.norm(self.conv(x))).mean((2, 3)))


def image(batch: int = 2, **kwargs: Any) -> Tensor:
    return torch.randn(batch, 3, 8, 8, **kwargs)


def compiled(module: Any, **kwargs: Any) -> Any:
    return torch.compile(module, backend="plantune", **kwargs)


def refused() -> list[str | None]:
    return [piece.why_not for piece in pieces() if piece.why_not is not None]


def ran() -> tuple[int, int]:
    """Calls of pieces from plans, and through the framework."""
    stats = [piece.stats() for piece in pieces()]
    return sum(planned for planned, _ in stats), sum(eager for _, eager in stats)


def gradients(module: Any, *inputs: Tensor) -> list[Tensor]:
    module.zero_grad()
    module(*inputs).square().sum().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def assert_alike(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, **CLOSE)
