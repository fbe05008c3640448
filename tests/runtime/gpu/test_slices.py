"""Slices of channels are read where they are, by kernels that take them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from plantune import optimize

pytestmark = pytest.mark.gpu


class Dual(nn.Module):
    """As in a dual path network: a part is added to, a part is joined."""

    def __init__(self, channels: int, added: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 1) for _ in range(2))
        self.added = added

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.first(x), self.second(x)
        joined = torch.cat([x[:, self.added :], y[:, self.added :].relu(), y], 1)
        return (x[:, : self.added] + y[:, : self.added]).relu(), joined


@pytest.mark.parametrize(
    ("shape", "added"),
    [((4, 32, 9, 7), 16), ((4, 48, 8, 8), 20), ((1, 32, 5, 5), 9), ((3, 32, 1, 1), 24)],
)
def test_parts_of_images_are_right(shape, added):
    torch.manual_seed(0)
    module = Dual(shape[1], added).cuda().half().to(memory_format=torch.channels_last)
    x = torch.randn(shape, device="cuda").half().contiguous(memory_format=torch.channels_last)
    tuned = optimize(module.eval(), x, fallback="silent")
    exact = copy.deepcopy(module).double()
    with torch.no_grad():
        for scale in (1, -3):
            found, wanted = tuned(x * scale), exact((x * scale).double())
            for ours, theirs in zip(found, wanted, strict=True):
                assert (ours.double() - theirs).abs().max() <= 4e-3 * theirs.abs().max()
