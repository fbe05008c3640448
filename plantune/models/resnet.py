"""ResNet-18, -34 and -50 with torchvision's module names, order, initialisation and numerics.

Their weights load into torchvision's networks and the other way round, and one seed gives both the
same initial weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _conv3x3(in_planes: int, planes: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)


def _conv1x1(in_planes: int, planes: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_planes, planes, 1, stride, bias=False)


def _downsample(in_planes: int, planes: int, stride: int) -> nn.Sequential | None:
    """The projection of a block's identity, or None if the shapes agree."""
    if stride == 1 and in_planes == planes:
        return None
    return nn.Sequential(_conv1x1(in_planes, planes, stride), nn.BatchNorm2d(planes))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a residual."""

    expansion = 1

    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        # Made first and registered last, as in torchvision: the order draws the random numbers.
        downsample = _downsample(in_planes, planes, stride)
        self.conv1 = _conv3x3(in_planes, planes, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3(planes, planes)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a residual; the 3x3 convolution has the stride."""

    expansion = 4

    def __init__(self, in_planes: int, width: int, stride: int) -> None:
        super().__init__()
        planes = width * self.expansion
        downsample = _downsample(in_planes, planes, stride)
        self.conv1 = _conv1x1(in_planes, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv1x1(width, planes)
        self.bn3 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


Block = type[BasicBlock] | type[Bottleneck]


def _stage(block: Block, in_planes: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    """`blocks` blocks in a row, the first of which changes the shape."""
    planes = width * block.expansion
    first = block(in_planes, width, stride)
    return nn.Sequential(first, *(block(planes, width, 1) for _ in range(blocks - 1)))


class ResNet(nn.Module):
    """Input (N, in_channels, H, W), output (N, num_classes)."""

    def __init__(
        self, block: Block, depths: tuple[int, int, int, int], num_classes: int, in_channels: int
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = _stage(block, 64, 64, depths[0], stride=1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, depths[1], stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, depths[2], stride=2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        self._initialise()

    def _initialise(self) -> None:
        """He's initialisation of the convolutions; torch's defaults serve everything else."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


def resnet18(num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    """The 18-layer network of "Deep Residual Learning for Image Recognition"."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, in_channels)


def resnet34(num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    """The 34-layer network of "Deep Residual Learning for Image Recognition"."""
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes, in_channels)


def resnet50(num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    """The 50-layer network in torchvision's form, with the stride on the 3x3 convolution."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, in_channels)
