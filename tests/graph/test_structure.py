"""What a digest tells apart: layers and how they are joined, no names and no order of branches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plantune.graph.graph import Graph
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType

TYPE = TensorType((2, 4, 6, 6))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.downsample = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        main = self.bn1(self.conv1(x))
        return self.relu(main + self.downsample(x))


class Other(nn.Module):
    """The same layers under other names, the shortcut written first."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut = nn.Conv2d(4, 4, 1)
        self.layers = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        short = self.shortcut(x)
        return F.relu(self.layers(x) + short)


def graphs(module: nn.Module) -> list[Graph]:
    """In inference, folded and not, and in training."""
    folded = [extract(module.eval(), TYPE, fold=fold) for fold in (True, False)]
    return [*folded, differentiate(extract(module.train(), TYPE))]


def test_names_and_the_order_of_branches_do_not_count() -> None:
    for one, other in zip(graphs(Block()), graphs(Other()), strict=True):
        assert one.digest == other.digest
        assert one.named_digest != other.named_digest
        pairs = dict(zip(one.structure.nodes, other.structure.nodes, strict=True))
        assert set(pairs) == {node.name for node in one.nodes}
        ops = {node.name: node.op for node in other.nodes}
        assert all(node.op == ops[pairs[node.name]] for node in one.nodes)


class Wired(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        a = self.a(x)
        b = self.a(x + 1) if self.how == "shared" else self.b(x + 1)
        made = {"swapped": b - a, "both": (a - b, a), "turned": (a, a - b)}
        return made.get(self.how, a - b)


def test_each_way_of_joining_the_same_layers_has_its_own() -> None:
    ways = ("plain", "shared", "swapped", "both", "turned")
    type_ = TensorType((2, 4))
    digests = {extract(Wired(how), type_).digest for how in ways}
    wanted = {
        differentiate(extract(Wired("plain"), type_), [name]).digest
        for name in ("x", "a.weight", "b.weight")
    }
    assert len(digests | wanted) == len(ways) + 3


class Moving(nn.Module):
    """Two buffers, one of which moves."""

    def __init__(self, moves: str) -> None:
        super().__init__()
        for name in ("one", "two"):
            self.register_buffer(name, torch.zeros(3))
        self.moves = moves

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.one - self.two
        getattr(self, self.moves).add_(1)
        return y


def test_which_buffer_moves_counts() -> None:
    one, two = (extract(Moving(name), TensorType((3,))).digest for name in ("one", "two"))
    assert one != two


def test_a_buffer_is_no_parameter() -> None:
    held = Moving("one")
    del held.two
    held.register_parameter("two", nn.Parameter(torch.zeros(3)))
    assert extract(held, TensorType((3,))).digest != extract(Moving("one"), TensorType((3,))).digest


def test_a_deep_network_is_numbered_without_recursion() -> None:
    deep = nn.Sequential(*(nn.ReLU() if at % 2 else nn.Sigmoid() for at in range(3000)))
    graph = extract(deep, TensorType((2,)))
    assert graph.structure.nodes == tuple(node.name for node in graph.nodes)
