"""How torch spells tensors of one number, which follow from no other tensor's values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from plantune.graph.spelling.reader import NotRead, Reader, Value

Sizes = Sequence[int]
Dtype = torch.dtype | None


def filled(g: Reader, sizes: Sizes, number: float, dtype: torch.dtype) -> Value:
    """A tensor of that number, as if it was asked for without another tensor."""
    made = g.torch_op(torch.ops.aten.full.default, list(sizes), number, dtype=dtype)
    g.numbers[made] = number
    return made


def _zeros(g: Reader, size: Sizes, *, dtype: Dtype = None, **_: Any) -> Value:
    return filled(g, size, 0, dtype or torch.get_default_dtype())


def _like(number: float) -> Callable[..., Value]:
    def read(g: Reader, x: Value, *, dtype: Dtype = None, **_: Any) -> Value:
        return filled(g, g.shape(x), number, dtype or g.type_of(x).torch_dtype)

    return read


def _new(number: float) -> Callable[..., Value]:
    def read(g: Reader, x: Value, size: Sizes, *, dtype: Dtype = None, **_: Any) -> Value:
        return filled(g, size, number, dtype or g.type_of(x).torch_dtype)

    return read


def _full_like(g: Reader, x: Value, number: Any, *, dtype: Dtype = None, **_: Any) -> Value:
    return _like(_number(number))(g, x, dtype=dtype)


def _new_full(g: Reader, x: Value, size: Sizes, number: Any, **kwargs: Any) -> Value:
    return _new(_number(number))(g, x, size, **kwargs)


def _fill(g: Reader, x: Value, number: Any) -> Value:
    """What `x` holds afterwards. Torch 2.11 copies a scalar into a slice that 2.15 fills."""
    return filled(g, g.shape(x), _number(number), g.type_of(x).torch_dtype)


def _scalar(g: Reader, number: Any, *, dtype: Dtype = None, **_: Any) -> Value:
    return filled(g, (), _number(number), dtype or torch.get_default_dtype())


def _put(
    g: Reader, x: Value, indices: Sequence[Any], value: Value, accumulate: bool = False
) -> Value:
    """`x[mask] = number`: torch would count what a mask chooses, which no captured graph can."""
    mask = indices[0]
    if accumulate or len(indices) != 1 or value not in g.numbers or mask is None:
        raise NotRead("other numbers, or at places by their index")
    if g.type_of(mask).dtype != "bool":
        raise NotRead("places by their index")
    rows = g.shape(mask) + (1,) * (len(g.shape(x)) - len(g.shape(mask)))
    if rows != g.shape(mask):
        mask = g.torch_op(torch.ops.aten.reshape.default, mask, rows)
    return g.torch_op(torch.ops.aten.masked_fill.Scalar, x, mask, g.numbers[value])


def _number(number: Any) -> float:
    if not isinstance(number, (bool, int, float)):
        raise NotRead("a tensor of another tensor's number")
    return number


OVERLOADS: dict[str, Callable[..., Any]] = {
    "aten.zeros.default": _zeros,
    "aten.zeros_like.default": _like(0),
    "aten.ones_like.default": _like(1),
    "aten.full_like.default": _full_like,
    "aten.new_zeros.default": _new(0),
    "aten.new_ones.default": _new(1),
    "aten.new_full.default": _new_full,
    "aten.fill.Scalar": _fill,
    "aten.scalar_tensor.default": _scalar,
    "aten.index_put.default": _put,
}
