"""How torch spells what changes or asks for a shape."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from plantune.graph.spelling.reader import Reader, Spelled, Value, by_attributes


def _identity(g: Reader, x: Value, *_: Any, **__: Any) -> Value:
    return x


def reshape(g: Reader, x: Value, *sizes: Any) -> Value:
    wanted = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else [*sizes]
    if -1 in wanted:
        rest = math.prod(size for size in wanted if size != -1)
        wanted[wanted.index(-1)] = g.type_of(x).numel // max(rest, 1)
    return x if tuple(wanted) == g.shape(x) else g.emit("reshape", x, shape=tuple(wanted))


def _flatten(g: Reader, x: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    shape = g.shape(x)
    start, end = start_dim % len(shape), end_dim % len(shape)
    return reshape(g, x, *shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :])


def _unsqueeze(g: Reader, x: Value, dim: int) -> Value:
    shape = list(g.shape(x))
    shape.insert(dim % (len(shape) + 1), 1)
    return reshape(g, x, *shape)


def _permute(g: Reader, x: Value, *dims: Any) -> Value:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    rank = len(g.shape(x))
    return g.emit("permute", x, dims=tuple(dim % rank for dim in order))


def _transpose(g: Reader, x: Value, dim0: int = 0, dim1: int = 1) -> Value:
    order = list(range(len(g.shape(x))))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(g, x, *order)


def _size(g: Reader, x: Value, dim: int | None = None) -> Any:
    return g.shape(x) if dim is None else g.shape(x)[dim]


def _attribute(g: Reader, x: Value, name: str) -> Any:
    known = {"shape": g.shape(x), "ndim": len(g.shape(x)), "dtype": g.type_of(x).torch_dtype}
    if name not in known:
        raise g.unsupported(f"attribute {name!r} of a tensor")
    return known[name]


# Their result shares the memory of their input.
_VIEWS: Spelled = {
    nn.Flatten: by_attributes(_flatten),
    nn.Identity: lambda g, m, x: x,
    **dict.fromkeys((torch.reshape, "reshape", "view"), reshape),
    **dict.fromkeys((torch.flatten, "flatten"), _flatten),
    **dict.fromkeys((torch.permute, "permute"), _permute),
    **dict.fromkeys((torch.transpose, "transpose", "t"), _transpose),
    **dict.fromkeys((torch.unsqueeze, "unsqueeze"), _unsqueeze),
    "contiguous": _identity,
}
VIEWS: frozenset[Any] = frozenset(_VIEWS)
SPELLED: Spelled = {
    **_VIEWS,
    getattr: _attribute,
    "size": _size,
    "dim": lambda g, x: len(g.shape(x)),
}
