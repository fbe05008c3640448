"""A graph so small that all of its covers can be tried."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune.graph.graph import Graph
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType


class Small(nn.Module):
    """Two convolutions, a bias and a residual: enough to fuse and to convert."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, 1, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(1))
        self.conv2 = nn.Conv2d(8, 8, 3, 1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv1(x) + self.bias)
        return torch.relu(self.conv2(y) + y)


@pytest.fixture(scope="session")
def graph() -> Graph:
    return extract(Small().eval(), TensorType((2, 4, 8, 8)))
