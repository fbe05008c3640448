"""How torch spells conversions between dtypes, and which one it makes of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plantune.graph.spelling.reader import Reader, Spelled, Value
from plantune.graph.types import dtype_name


def cast(g: Reader, x: Value, dtype: torch.dtype) -> Value:
    """`x` in that dtype; `x` itself if it has it."""
    if g.type_of(x).torch_dtype is dtype:
        return x
    if not dtype.is_floating_point:
        raise g.unsupported(f"a cast to {dtype}")
    return g.emit("cast", x, dtype=dtype_name(dtype))


def promoted(g: Reader, a: Value, b: Value) -> tuple[Value, Value]:
    """Both operands in the dtype in which torch combines them."""
    dtype = torch.result_type(*(_like(g, value) for value in (a, b)))
    return cast(g, a, dtype), cast(g, b, dtype)


def _like(g: Reader, value: Value) -> torch.Tensor:
    """A tensor of its shape and dtype without memory: a scalar's dtype counts less."""
    type_ = g.type_of(value)
    return torch.empty(type_.shape, dtype=type_.torch_dtype, device="meta")


def floating(g: Reader, x: Value) -> Value:
    """`x`; an integer in the floating dtype that torch would give it."""
    return x if g.type_of(x).is_float else cast(g, x, torch.get_default_dtype())


def _to(
    g: Reader,
    x: Value,
    target: Any = None,
    *,
    dtype: torch.dtype | None = None,
    other: Value | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Value:
    for named in (dtype, other):
        target = named if target is None else target
    if isinstance(target, Value):
        return cast(g, x, g.type_of(target).torch_dtype)
    if target is not None and not isinstance(target, torch.dtype):
        raise g.unsupported(f"a move to {target!r}")
    return x if target is None else cast(g, x, target)


def _type(g: Reader, x: Value, dtype: torch.dtype) -> Value:
    if not isinstance(dtype, torch.dtype):
        raise g.unsupported(f"a cast to {dtype!r}")
    return cast(g, x, dtype)


def _fixed(dtype: torch.dtype) -> Callable[..., Value]:
    def read(g: Reader, x: Value) -> Value:
        return cast(g, x, dtype)

    return read


SPELLED: Spelled = {
    "to": _to,
    "type": _type,
    "type_as": lambda g, x, other: cast(g, x, g.type_of(other).torch_dtype),
    "half": _fixed(torch.float16),
    "bfloat16": _fixed(torch.bfloat16),
    "float": _fixed(torch.float32),
    "double": _fixed(torch.float64),
}
