"""Numbers that a last bit decides, and those of bools: what eager gives, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plantune
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.plans.plan import PROGRAM
from plantune.runtime.calls import choose

Function = Callable[[Tensor], Any]


class Net(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """What a program makes of a function's input."""
    monkeypatch.setitem(choose.UNPLANNED, "cpu", PROGRAM)

    def run(function: Function, x: Tensor) -> Tensor:
        tuned = plantune.optimize(Net(function), x)
        result: Tensor = tuned(x)
        assert tuned.last_call().how == "planned"
        return result

    return run


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x / 41).floor(),
        lambda x: (x / 41).long(),
        lambda x: (x / 47 - 2).view(4, -1).ceil(),
        lambda x: (x / 41).clamp(max=30).to(torch.int32),
        lambda x: (x + 0.0).div_(41).reshape(-1, 4).floor_(),
        lambda x: x / 41 >= 1,
        lambda x: torch.bucketize(x / 41, torch.arange(9.0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_what_steps_at_a_quotient(planned: Any, function: Function, dtype: torch.dtype) -> None:
    x = torch.arange(2000).to(dtype)
    wanted, other = function(x), function(x.float() * (1 / 41))
    assert torch.equal(planned(function, x), wanted)
    assert not torch.equal(wanted, other)  # so a product would be told from a quotient


def test_other_quotients_are_products_for_fusions() -> None:
    network = Net(lambda x: (x / 41).relu().sum(1) > 3)
    graph = extract(network, TensorType((2, 3), "float32"))
    assert "affine" in [node.op for node in graph.nodes]


@pytest.mark.parametrize(
    "function", [lambda x: x * 2, lambda x: x + 1, lambda x: x.mul(3).add(1), lambda x: x * 0.5]
)
def test_a_bool_and_a_number(planned: Any, function: Function) -> None:
    x = torch.tensor([[True, False], [False, True]])
    made, wanted = planned(function, x), function(x)
    assert made.dtype == wanted.dtype
    assert torch.equal(made, wanted)
