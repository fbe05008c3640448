"""Tensors of one number, however they are asked for, are torch's own op of a size and a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from plantune.graph.graph import Graph
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType

ROWS = (2, 3, 4)
aten = torch.ops.aten
Forward = Callable[[Any, torch.Tensor], Any]
# Whatever tensor they are asked for like, the graph has torch's own op of a size and a number.
FILLS: list[Forward] = [
    lambda m, x: x + torch.zeros_like(x),
    lambda m, x: x * torch.ones_like(m.row, dtype=torch.float32),
    lambda m, x: x + torch.full_like(m.column, 0.5),
    lambda m, x: x + x.new_zeros(4),
    lambda m, x: x + torch.zeros(3, 1, dtype=torch.float64),
    lambda m, x: x + x.new_ones((3, 1), dtype=torch.float32),
    lambda m, x: x.new_full((4,), 2.5) * x,
    lambda m, x: x * torch.zeros_like(x).fill_(2.0),
    lambda m, x: x * torch.zeros_like(x).copy_(torch.scalar_tensor(2)),
    lambda m, x: x * aten.copy(x, aten.scalar_tensor(3, dtype=torch.int64)),
]


def state() -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(torch.empty(4 if name == "row" else (3, 1)))
        for name in ("row", "column")
    }


class Slices(nn.Module):
    """Numbers in slices as releases of torch write them."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_zeros(x.shape[-1])
        if self.copies:
            mask[1:3].copy_(aten.scalar_tensor(7, dtype=torch.int64).expand(2))
        else:
            mask[1:3].fill_(7)
        return x * mask


@pytest.mark.parametrize("forward", FILLS)
def test_a_fill_follows_from_no_value(
    forward: Forward, calls: Any, randomise: Any, extracts: Callable[..., Graph]
) -> None:
    x = torch.randn(ROWS, dtype=torch.float64)
    graph = extracts(randomise(calls(forward, **state())), x)
    (fill,) = (node for node in graph.nodes if "." in node.op)
    assert fill.op == "aten.full.default"
    assert fill.name in graph.fixed
    assert fill.name in graph.constants


def puts(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * m.row
    y[x > 0] = 0.5
    y[x[..., 0] < -0.5] = 3
    return y


def test_a_number_where_a_mask_is_asks_for_no_count(
    calls: Any, randomise: Any, extracts: Callable[..., Graph]
) -> None:
    """What torch would do with the mask waits for a GPU, and cannot be captured."""
    x = torch.randn(ROWS, dtype=torch.float64)
    ops = {node.op for node in extracts(randomise(calls(puts, **state())), x).nodes}
    assert "aten.masked_fill.Scalar" in ops
    assert "aten.index_put.default" not in ops


def test_a_number_in_a_slice_is_one_graph_however_it_is_written() -> None:
    filled, copied = (
        extract(Slices(copies), TensorType((2, 4), "float16")) for copies in (False, True)
    )
    assert filled.digest == copied.digest
    assert {node.op for node in filled.nodes} >= {"aten.full.default", "aten.slice_scatter.default"}
