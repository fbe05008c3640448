"""Steps in which every shipped fusion has its longest path."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from plantune.graph.fusions import all_fusions, groups_from
from plantune.graph.graph import Graph
from plantune.graph.partition import why_not_group
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.step import Step, make_step
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.layers import SpaceToDepth
from plantune.models.resnet import BasicBlock
from plantune.models.se_resnet9 import FixupBlock


class Stem(nn.Module):
    """What the other networks lack: the stem with a bias, and pooling before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(SpaceToDepth(2), nn.Conv2d(12, 8, 1), nn.ReLU())
        self.offset = nn.Parameter(torch.ones(1))
        self.down = nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.Conv2d(8, 6, 1))
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        return torch.relu(self.fc(self.down(self.stem(x) + self.offset).mean((2, 3))))


class Pixels(nn.Module):
    """A stem behind what makes numbers of its images' pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem()
        self.mean = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x):
        return self.stem(x / 16 - self.mean)


class Scaled(nn.Module):
    """A convolution with every part of an epilogue, twice, the second time as a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(4, 4, 1, bias=False)
        self.scale, self.bias, self.offset = (nn.Parameter(torch.ones(1)) for _ in range(3))

    def forward(self, x):
        y = torch.relu(self.conv1(x) * self.scale + self.bias + x) + self.offset
        return torch.relu(self.conv2(y) * self.scale + self.bias) + self.offset


class Normed(nn.Module):
    """A group norm with all that may follow one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        return torch.relu(self.norm(x) + x)


class Joined(nn.Module):
    """Images one after the other, normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return torch.relu(self.norm(torch.cat((x, x.sigmoid()), 1)))


class Turned(nn.Module):
    """Axes in another order, three times."""

    def forward(self, x):
        return torch.relu(x).transpose(1, 2).transpose(2, 3).transpose(1, 2)


class Scores(nn.Module):
    """Numbers of each row, normalised."""

    def forward(self, x):
        return torch.sigmoid(x * 2.0 + x.mean()).softmax(-1)


class Flat(nn.Module):
    """A layer of images laid flat."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(36, 5)

    def forward(self, x):
        return torch.relu(self.fc(torch.relu(x).flatten(1)))


class Rolled(nn.Module):
    """An image moved and turned, as windows are taken from one."""

    def forward(self, x):
        return torch.relu(x).roll(1, 2).transpose(2, 3).roll(2, 1) + x


class Attending(nn.Module):
    """Scores, what they weigh, and heads put beside each other."""

    def forward(self, x):
        q, k, v = x, x.sigmoid(), torch.relu(x)
        weighed = (q @ k.transpose(-2, -1) * 0.5 + v).softmax(-1) @ v
        return weighed.permute(0, 2, 1, 3).reshape(2, 4, 16)


def graphs() -> Iterator[Graph]:
    """Graphs in which every shipped fusion has its longest path, without and with gradients."""
    for module, shape in (
        (FixupBlock(16, 16, 1), (2, 16, 4, 4)),
        (FixupBlock(16, 32, 2), (2, 16, 4, 4)),
        (BasicBlock(4, 4, 1), (2, 4, 4, 4)),
        (Stem(), (2, 3, 8, 8)),
        (Pixels(), (2, 3, 8, 8)),
        (Scaled(), (2, 4, 5, 5)),
        (Normed(), (2, 4, 3, 3)),
        (Joined(), (2, 4, 3, 3)),
        (Turned(), (2, 4, 4, 4)),
        (Scores(), (2, 4, 3, 3)),
        (Flat(), (2, 4, 3, 3)),
        (Rolled(), (2, 4, 4, 4)),
        (Attending(), (2, 4, 4, 4)),
    ):
        yield extract(module.eval(), TensorType(shape))
        graph = extract(module.train(), TensorType(shape), fold=False)
        yield differentiate(graph, ["x", *(name for name, _ in graph.parameters)])


def longest_steps(fusion, graph) -> Iterator[Step]:
    """The longest group that a fusion offers from each node."""
    for node in graph.nodes:
        groups = [g for g in groups_from(graph, node, fusion) if why_not_group(graph, g) is None]
        if groups:
            yield make_step(graph, max(groups, key=len))


GRAPHS = tuple(graphs())
STEPS = {
    fusion.name: [step for graph in GRAPHS for step in longest_steps(fusion, graph)]
    for fusion in all_fusions()
}
