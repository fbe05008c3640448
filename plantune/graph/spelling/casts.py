"""How torch spells conversions between dtypes, and which one it makes of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plantune.graph.ops.cast import INSERTED
from plantune.graph.spelling.reader import NotRead, Reader, Value
from plantune.graph.types import dtype_name


def cast(g: Reader, x: Value, dtype: torch.dtype, *, inserted: bool = False) -> Value:
    """`x` in that dtype; itself where it has it. The user's code does not say so if `inserted`."""
    if g.type_of(x).torch_dtype is dtype:
        return x
    if not dtype.is_floating_point:
        raise NotRead("a cast to integers")
    mark = {INSERTED: True} if inserted or g.is_inserted() else {}
    return g.emit("cast", x, dtype=dtype_name(dtype), **mark)


def promoted(g: Reader, a: Value, b: Value) -> tuple[Value, Value]:
    """Both operands in the dtype in which torch combines them."""
    dtype = torch.result_type(*(_like(g, value) for value in (a, b)))
    return cast(g, a, dtype, inserted=True), cast(g, b, dtype, inserted=True)


def _like(g: Reader, value: Value) -> torch.Tensor:
    """A tensor of its shape and dtype without memory: a scalar's dtype counts less."""
    type_ = g.type_of(value)
    return torch.empty(type_.shape, dtype=type_.torch_dtype, device="meta")


def floating(g: Reader, x: Value) -> Value:
    """`x`, an integer as torch makes it floating where a result must be."""
    return x if g.type_of(x).is_float else cast(g, x, torch.get_default_dtype())


def _to_dtype(
    g: Reader,
    x: Value,
    dtype: torch.dtype,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: Any = None,
) -> Value:
    return cast(g, x, dtype)


def _to_other(g: Reader, x: Value, other: Value, *_: Any, **__: Any) -> Value:
    return cast(g, x, g.type_of(other).torch_dtype)


def _to_device(g: Reader, x: Value, device: Any, dtype: torch.dtype, *_: Any, **__: Any) -> Value:
    """A network is on one device: torch would refuse to trace one that is not."""
    return cast(g, x, dtype)


def _to_layout(g: Reader, x: Value, *, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return x if dtype is None else cast(g, x, dtype)


OVERLOADS: dict[str, Callable[..., Any]] = {
    "aten.to.dtype": _to_dtype,
    "aten.to.other": _to_other,
    "aten.to.device": _to_device,
    "aten.to.dtype_layout": _to_layout,
    "aten.type_as.default": _to_other,
    "aten._to_copy.default": _to_layout,
}
