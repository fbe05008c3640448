"""SE-ResNet9-Fixup: the vision network of large-batch reinforcement learning.

A Fixup residual network replaces batch norm by scalar biases and one scale per block. The biases
are added before the convolutions pad, so `fixup_bias1a` and `fixup_bias2a` cannot be folded into a
per-channel bias: at the border they would be missing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plantune.layers import SpaceToDepth

STAGES = 4
SE_REDUCTION = 16


class SqueezeExcite(nn.Module):
    """A gate per channel, computed from the mean of each image's channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = channels // SE_REDUCTION
        self.excite = nn.Sequential(
            nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        n, c = x.shape[:2]
        gate = self.excite(x.mean((2, 3))).view(n, c, 1, 1)
        return x * gate


class FixupBlock(nn.Module):
    """Two 3x3 convolutions with scalar biases, squeeze-excite and a residual."""

    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.fixup_bias1a = nn.Parameter(torch.zeros(1))
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.fixup_bias1b = nn.Parameter(torch.zeros(1))
        self.fixup_bias2a = nn.Parameter(torch.zeros(1))
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.fixup_scale = nn.Parameter(torch.ones(1))
        self.fixup_bias2b = nn.Parameter(torch.zeros(1))
        self.relu = nn.ReLU()
        self.se = SqueezeExcite(planes)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_planes != planes:
            self.downsample = nn.Sequential(
                nn.AvgPool2d(3, stride, 1), nn.Conv2d(in_planes, planes, 1, bias=False)
            )

    def forward(self, x: Tensor) -> Tensor:
        biased = x + self.fixup_bias1a
        out = self.relu(self.conv1(biased) + self.fixup_bias1b)
        out = self.conv2(out + self.fixup_bias2a)
        out = out * self.fixup_scale + self.fixup_bias2b
        # The bias belongs to the identity only where the identity is computed from it.
        identity = x if self.downsample is None else self.downsample(biased)
        return self.relu(self.se(out) + identity)


class SEResNet9Fixup(nn.Module):
    """Input (N, in_channels, 64, 64), output (N, 8 * base_planes, 2, 2)."""

    def __init__(self, in_channels: int = 3, base_planes: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            SpaceToDepth(4), nn.Conv2d(in_channels * 16, base_planes, 1, bias=False), nn.ReLU()
        )
        planes = [base_planes * 2**stage for stage in range(STAGES)]
        inputs = [base_planes, *planes[:-1]]
        self.layers = nn.ModuleList(
            nn.Sequential(FixupBlock(i, o, stride=1 if i == o else 2))
            for i, o in zip(inputs, planes, strict=True)
        )
        self._initialise()

    def _initialise(self) -> None:
        """Fixup's initialisation: the last convolution of each branch starts at zero."""
        for block in (layer[0] for layer in self.layers):  # type: ignore[index]
            fan = block.conv1.weight.shape[0] * block.conv1.weight[0, 0].numel()
            nn.init.normal_(block.conv1.weight, std=(2 / fan) ** 0.5 * STAGES**-0.5)
            nn.init.zeros_(block.conv2.weight)
            if block.downsample is not None:
                weight = block.downsample[1].weight
                nn.init.normal_(weight, std=(2 / weight.shape[0]) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


def se_resnet9_fixup(in_channels: int = 3, base_planes: int = 64) -> SEResNet9Fixup:
    """The network of the "Large Batch Simulation" agents, with its public parameter names."""
    return SEResNet9Fixup(in_channels, base_planes)
