"""Layers that torch has no module for."""

from __future__ import annotations

from torch import Tensor, nn


class SpaceToDepth(nn.Module):
    """Moves `block` x `block` pixels into channels: channel = (dy * block + dx) * C + c."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        b = self.block
        x = x.view(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
        return x.reshape(n, c * b * b, h // b, w // b)

    def extra_repr(self) -> str:
        return f"block={self.block}"
