"""Forwards that remember tensors in dicts of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plantune import optimize
from plantune.errors import UnsupportedModule
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType

IMAGE = TensorType((2, 4))


class Biases(nn.Module):
    """As LeViT: what follows from a weight is computed once for each device."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.cache = nn.Parameter(torch.randn(3)), {}

    def forward(self, x: Tensor) -> Tensor:
        key = str(x.device)
        if key not in self.cache:
            self.cache[key] = self.bias[torch.arange(4, device=x.device) % 3]
        return x + self.cache[key]


class Keeps(nn.Module):
    """Remembers something in one of its containers in each call."""

    def __init__(self, keep) -> None:
        super().__init__()
        self.table, self.values, self.keep = {"n": 0}, [], keep

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        return 2 * x


def test_a_cache_is_computed_from_the_weights_as_they_are() -> None:
    module = Biases()
    tuned, x = optimize(module.eval(), torch.zeros(2, 4)), torch.randn(2, 4)
    assert module.cache == {}
    expected = x + module.bias[[0, 1, 2, 0]]
    for _ in range(2):  # the second one finds what the first remembered
        with torch.no_grad():
            torch.testing.assert_close(tuned(x), expected)
    assert [name for name, _ in extract(module, IMAGE).parameters] == ["bias"]


def test_what_earlier_calls_remembered_is_no_constant() -> None:
    module = Biases()
    with torch.no_grad():
        module(torch.zeros(2, 4))
    kept = module.cache["cpu"]
    digest = extract(module, IMAGE).digest
    assert module.cache["cpu"] is kept
    assert digest == extract(Biases(), IMAGE).digest


@pytest.mark.parametrize(
    "keep",
    [
        lambda m, x: m.values.append(x),
        lambda m, x: m.table.update(n=m.table["n"] + 1),
        lambda m, x: m.table.update(more=1),
        lambda m, x: m.table.update(last=x),
        lambda m, x: m.table.update(noise=torch.rand(2, 4)),
    ],
    ids=["a list", "a number", "another number", "what follows from the input", "random numbers"],
)
def test_what_differs_from_call_to_call_is_refused(keep) -> None:
    module = Keeps(keep)
    with pytest.raises(UnsupportedModule, match=r"a forward that (changes|keeps)"):
        extract(module, IMAGE)
    assert (module.values, module.table) == ([], {"n": 0})


def test_a_tensor_that_does_not_come_back_is_refused() -> None:
    """A forward that reads one under a key has it as a constant."""
    module = Keeps(lambda m, x: m.table.get("mask"))
    module.table["mask"] = torch.ones(4)
    with pytest.raises(UnsupportedModule):
        extract(module, IMAGE)


class Resized(nn.Module):
    """As ConViT: indices that follow from the number of rows are kept for the next call."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1), persistent=persistent)
        self.columns = None

    def forward(self, x: Tensor) -> Tensor:
        if self.rows.shape[0] != x.shape[0]:
            self.rows = torch.arange(x.shape[0], device=x.device) * 1.0
        if self.columns is None:
            self.columns = torch.arange(x.shape[1], device=x.device)
        return x + self.rows[:, None] * self.columns


def test_what_follows_from_shapes_alone_may_be_kept() -> None:
    module = Resized(persistent=False).eval()
    for rows in (2, 3):
        x = torch.randn(rows, 4)
        tuned = optimize(module, x)
        with torch.no_grad():
            wanted = x + torch.arange(rows)[:, None] * torch.arange(4)
            torch.testing.assert_close(tuned(x), wanted)
    assert len(module.rows) == 1
    with pytest.raises(UnsupportedModule, match=r"assigns to self\.rows"):
        optimize(Resized(persistent=True), torch.zeros(2, 4))


@pytest.mark.parametrize("follows", [lambda m, x: x.sum(), lambda m, x: m.weight * 2])
def test_what_follows_from_more_may_not(follows) -> None:
    class Logs(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = follows(self, x)
            return super().forward(x)

    with pytest.raises(UnsupportedModule, match=r"assigns to self\.last"):
        extract(Logs(4, 4), IMAGE)


class Shaped(nn.Linear):
    size: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.size, self.calls_made = tuple(x.shape), "some"
        return super().forward(x) * self.size[0]


def test_a_constant_that_is_there_already_may_be_assigned() -> None:
    """What an eager call left is right for each other call of its shape."""
    module, x = Shaped(4, 4).eval(), torch.randn(2, 4)
    with pytest.raises(UnsupportedModule, match=r"assigns to self\.size"):
        optimize(module, x)
    wanted = module(x)
    tuned = optimize(module, x, fallback="silent")
    torch.testing.assert_close(tuned(x), wanted)
    wide = torch.randn(3, 4)
    torch.testing.assert_close(tuned(wide), module(wide))
    assert tuned.reference.size == (3, 4)
    torch.testing.assert_close(tuned(x), wanted)
    assert tuned.reference.size == (2, 4)
