from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from plantune.base.canonical import Attrs
from plantune.graph.fusions import all_fusions
from plantune.graph.graph import Graph
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.plans.guess import Preference, compose
from plantune.plans.plan import Plan
from plantune.space.search_space import SearchSpace, load_search_space


class Block(nn.Module):
    """A 3x3 and a 1x1 convolution with scalars and a residual, then a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.bias = nn.Parameter(torch.zeros(1))
        self.conv2 = nn.Conv2d(6, 4, 1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv1(x) + self.bias)
        y = torch.relu(self.conv2(y) + x)
        return torch.sigmoid(self.fc(y.mean((2, 3), keepdim=True).flatten(1)))


@pytest.fixture(scope="session")
def space() -> SearchSpace:
    return load_search_space("cpu")


@pytest.fixture(scope="session")
def graph() -> Graph:
    return extract(Block().eval(), TensorType((2, 4, 6, 6)))


@pytest.fixture
def plan(graph: Graph, space: SearchSpace) -> Plan:
    """A plan with fused steps, several families, branches and evidence."""
    composed = compose(
        graph,
        space,
        network="block",
        fusions=all_fusions(),
        preferences=(Preference("onednn_conv"), Preference("gemm")),
    )
    evidence = Attrs(torch="2.13.0", ratio=0.1 + 0.2, low=5e-324, seeds=(0, 1), clean=True)
    return replace(composed, evidence=evidence, branches=True)
