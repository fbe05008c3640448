from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plantune.base.canonical import canonical
from plantune.errors import InvalidGraph
from plantune.graph.types import DTYPES, LAYOUTS, TensorType, dtype_name

SHAPES = st.lists(st.integers(0, 5), max_size=5).map(tuple)


@given(SHAPES, st.sampled_from(sorted(DTYPES)), st.sampled_from(LAYOUTS))
def test_json_is_exact(shape: tuple[int, ...], dtype: str, layout: str) -> None:
    type_ = TensorType(shape, dtype, layout if len(shape) == 4 else "nchw")
    assert TensorType.from_json(json.loads(canonical(type_.to_json()))) == type_


@given(SHAPES, st.sampled_from(sorted(DTYPES)))
def test_numbers_are_those_of_a_torch_tensor(shape: tuple[int, ...], dtype: str) -> None:
    type_ = TensorType(shape, dtype)
    tensor = torch.empty(shape, dtype=DTYPES[dtype])
    assert type_.numel == tensor.numel()
    assert type_.size_bytes == tensor.numel() * tensor.element_size()
    assert type_.is_float == tensor.is_floating_point()
    assert type_.torch_dtype == tensor.dtype
    assert type_.strides("nchw") == tensor.stride()


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1, 1, 1), (3, 1, 2, 2), (1, 7, 5, 1)])
def test_nhwc_strides_are_those_of_channels_last(shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape).to(memory_format=torch.channels_last)
    assert TensorType(shape).strides("nhwc") == tensor.stride()


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_names_are_torchs(name: str) -> None:
    assert dtype_name(getattr(torch, name)) == name


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(InvalidGraph, match=r"torch.complex64 is not one of float64, float32"):
        dtype_name(torch.complex64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shape": (2, -1)}, r"shape \(2, -1\): sizes must be integers, 0 or more"),
        ({"shape": (2, 1.0)}, "sizes must be integers"),
        ({"shape": (True,)}, "sizes must be integers"),
        ({"shape": (2,), "dtype": "float8"}, "dtype 'float8' is not one of float64"),
        ({"shape": (2,), "layout": "nchw8"}, "layout 'nchw8' is not one of nchw, nhwc"),
        ({"shape": (2, 3, 4), "layout": "nhwc"}, r"nhwc needs rank 4, got shape \(2, 3, 4\)"),
    ],
)
def test_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidGraph, match=message):
        TensorType(**fields)
