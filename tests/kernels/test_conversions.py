"""What conversions are taken to cost: by size, by kind, by chip."""

from __future__ import annotations

import pytest

from plantune.graph.types import TensorType
from plantune.kernels.conversions import conversion_cost
from plantune.space.arch import load_arch

COST = conversion_cost(load_arch("sm90"))


@pytest.mark.parametrize(
    ("shape", "dtype", "measured_us"),
    [
        ((10, 480, 224, 224), "float16", 249.8),
        ((64, 64, 112, 112), "float32", 102.6),
        ((64, 3, 224, 224), "float32", 19.6),
        ((16, 64, 225, 225), "float32", 122.0),
        ((1, 64, 56, 56), "float16", 2.0),
    ],
)
def test_it_is_near_to_what_was_measured(shape, dtype, measured_us):
    """On an H200, 2026-11-28, tools/studies/layouts.py."""
    assert COST.time_us(TensorType(shape, dtype)) == pytest.approx(measured_us, rel=0.2)


def test_what_torch_copies_takes_longer():
    by_torch = TensorType((64, 257, 341, 3), "float16")  # no whole words along channels or pixels
    ours = TensorType((64, 256, 341, 3), "float16")
    assert COST.time_us(by_torch) > 2 * COST.time_us(ours)


@pytest.mark.parametrize("shape", [(8, 64), (8, 64, 1, 1), (8, 1, 16, 16)])
def test_what_has_one_layout_costs_nothing(shape):
    assert COST.time_us(TensorType(shape, "float16")) == 0.0


def test_a_cast_moves_both_dtypes():
    wide, narrow = (TensorType((64, 64, 112, 112), dtype) for dtype in ("float32", "float16"))
    cast = COST.cast_us(wide, narrow, odd=False)
    assert COST.time_us(narrow) < cast < COST.time_us(wide)
    assert cast == COST.cast_us(narrow, wide, odd=False)
