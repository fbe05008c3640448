"""How torch spells what changes a shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from plantune.graph.spelling.casts import cast
from plantune.graph.spelling.fills import filled
from plantune.graph.spelling.reader import NotRead, Reader, Value


def _identity(g: Reader, x: Value, **_: Any) -> Value:
    return x


def reshape(g: Reader, x: Value, sizes: Sequence[int]) -> Value:
    wanted = list(sizes)
    if -1 in wanted:
        rest = math.prod(size for size in wanted if size != -1)
        wanted[wanted.index(-1)] = g.type_of(x).numel // max(rest, 1)
    return x if tuple(wanted) == g.shape(x) else g.emit("reshape", x, shape=tuple(wanted))


def _flatten(g: Reader, x: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    shape = g.shape(x)
    if not shape:
        return reshape(g, x, (1,))
    start, end = start_dim % len(shape), end_dim % len(shape)
    middle = math.prod(shape[start : end + 1])
    return reshape(g, x, (*shape[:start], middle, *shape[end + 1 :]))


def _unflatten(g: Reader, x: Value, dim: int, sizes: Sequence[int]) -> Value:
    shape = g.shape(x)
    at = dim % len(shape)
    known = math.prod(size for size in sizes if size != -1)
    split = [shape[at] // max(known, 1) if size == -1 else size for size in sizes]
    return reshape(g, x, (*shape[:at], *split, *shape[at + 1 :]))


def _unsqueeze(g: Reader, x: Value, dim: int) -> Value:
    shape = list(g.shape(x))
    shape.insert(dim % (len(shape) + 1), 1)
    return reshape(g, x, shape)


def _squeeze(g: Reader, x: Value, dim: Any = None) -> Value:
    shape = g.shape(x)
    if not shape:
        return x
    dims = range(len(shape)) if dim is None else dim if isinstance(dim, list) else [dim]
    gone = {axis % len(shape) for axis in dims if shape[axis] == 1}
    return reshape(g, x, [size for axis, size in enumerate(shape) if axis not in gone])


def _permute(g: Reader, x: Value, dims: Sequence[int]) -> Value:
    rank = len(g.shape(x))
    return g.emit("permute", x, dims=tuple(dim % rank for dim in dims))


def transpose(g: Reader, x: Value, dim0: int = 0, dim1: int = 1) -> Value:
    order = list(range(len(g.shape(x))))
    if not order:
        return x
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(g, x, order)


def _t(g: Reader, x: Value) -> Value:
    return transpose(g, x) if len(g.shape(x)) == 2 else x


def _expand(g: Reader, x: Value, sizes: Sequence[int], *, implicit: bool = False) -> Value:
    shape, new = g.shape(x), len(sizes) - len(g.shape(x))
    wanted = [shape[at - new] if size == -1 else size for at, size in enumerate(sizes)]
    if x in g.numbers:
        return filled(g, wanted, g.numbers[x], g.type_of(x).torch_dtype)
    if not g.type_of(x).is_float:
        raise NotRead("an expansion of integers")
    return x if tuple(wanted) == shape else g.emit("broadcast_to", x, shape=tuple(wanted))


def _expand_as(g: Reader, x: Value, other: Value) -> Value:
    return _expand(g, x, g.shape(other))


def _copy(g: Reader, x: Value, source: Value, non_blocking: bool = False) -> Value:
    """What `x` holds after it was written: torch knows no gradient of the overload itself."""
    dtype, number = g.type_of(x).torch_dtype, g.numbers.get(source)
    if number is not None:
        return filled(g, g.shape(x), number, dtype)
    same = cast(g, source, dtype)
    return same if g.shape(same) == g.shape(x) else _expand(g, same, g.shape(x))


def _like(g: Reader, x: Value, other: Value) -> Value:
    return reshape(g, x, g.shape(other))


def _pad(
    g: Reader, x: Value, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Value:
    """Windows that fit are often padded by nothing, which torch copies for."""
    if any(pad):
        raise NotRead("padding")
    return x


def _constant_pad(g: Reader, x: Value, pad: Sequence[int], value: float = 0) -> Value:
    return _pad(g, x, pad)


OVERLOADS: dict[str, Callable[..., Any]] = {
    "aten.view.default": reshape,
    "aten.reshape.default": reshape,
    "aten._unsafe_view.default": reshape,
    "aten.reshape_as.default": _like,
    "aten.view_as.default": _like,
    "aten.flatten.using_ints": _flatten,
    "aten.unflatten.int": _unflatten,
    "aten.permute.default": _permute,
    "aten.transpose.int": transpose,
    "aten.t.default": _t,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.expand.default": _expand,
    "aten.expand_as.default": _expand_as,
    "aten.pad.default": _pad,
    "aten.constant_pad_nd.default": _constant_pad,
    "aten.contiguous.default": _identity,
    "aten.copy.default": _copy,
    "aten.clone.default": _identity,
    "aten.alias.default": _identity,
}
