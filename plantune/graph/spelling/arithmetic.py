"""How torch spells arithmetic, activations and reductions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from plantune.graph.ops.functions import FUNCTIONS as TABLE
from plantune.graph.ops.functions import Function
from plantune.graph.spelling.casts import floating, promoted
from plantune.graph.spelling.reader import Reader, Spelled, Value

Shape = tuple[int, ...]


def _activation(op: str) -> Callable[..., Value]:
    def read(g: Reader, x: Value, inplace: bool = False) -> Value:
        return g.emit(op, x)

    return read


def _activation_module(op: str) -> Callable[..., Value]:
    def read(g: Reader, m: nn.Module, x: Value) -> Value:
        return g.emit(op, x)

    return read


def _reduce(op: str) -> Callable[..., Value]:
    def read(g: Reader, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        rank = len(g.shape(x))
        dims = range(rank) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
        return g.emit(op, x, dims=tuple(sorted(axis % rank for axis in dims)), keepdim=keepdim)

    return read


def _broadcast(g: Reader, a: Value, b: Value) -> tuple[Value, Value]:
    """Both operands in the dtype of the result, `a` also in its shape."""
    a, b = promoted(g, a, b)
    shape = _shape_of_both(g, g.shape(a), g.shape(b))
    return (a if g.shape(a) == shape else g.emit("broadcast_to", a, shape=shape)), b


def _shape_of_both(g: Reader, a: Shape, b: Shape) -> Shape:
    """As torch.broadcast_shapes, which would import sympy: 0.26 s of a first call."""
    pairs = [*zip_longest(reversed(a), reversed(b), fillvalue=1)]
    if any(1 not in pair and pair[0] != pair[1] for pair in pairs):
        raise g.unsupported(f"arithmetic on shapes {a} and {b}, which do not fit,")
    return tuple(y if x == 1 else x for x, y in reversed(pairs))


def _affine(g: Reader, x: Value, alpha: Any, beta: Any) -> Value:
    if isinstance(alpha, float) or isinstance(beta, float):
        x = floating(g, x)
    return g.emit("affine", x, alpha=float(alpha), beta=float(beta))


def _add(g: Reader, a: Any, b: Any, *, alpha: float = 1) -> Value:
    if alpha != 1:
        raise g.unsupported("an addition with alpha")
    if not isinstance(a, Value) or not isinstance(b, Value):
        value, number = (a, b) if isinstance(a, Value) else (b, a)
        return _affine(g, value, 1, number)
    if len(g.shape(a)) < len(g.shape(b)) or g.type_of(a).numel < g.type_of(b).numel:
        a, b = b, a
    return g.emit("add", *_broadcast(g, a, b))


def _sub(g: Reader, a: Any, b: Any) -> Value:
    if not isinstance(b, Value):
        return _affine(g, a, 1, -b)
    if not isinstance(a, Value):
        return _affine(g, b, -1, a)
    return g.emit("sub", *_broadcast(g, a, b))


def _mul(g: Reader, a: Any, b: Any) -> Value:
    if not isinstance(a, Value) or not isinstance(b, Value):
        value, number = (a, b) if isinstance(a, Value) else (b, a)
        return _affine(g, value, number, 0)
    if len(g.shape(a)) < len(g.shape(b)) or g.type_of(a).numel < g.type_of(b).numel:
        a, b = b, a
    return g.emit("mul", *_broadcast(g, a, b))


def _div(g: Reader, a: Any, b: Any) -> Value:
    if not isinstance(a, Value):
        raise g.unsupported("a number divided by a tensor")
    if not isinstance(b, Value):
        return _affine(g, a, 1 / b, 0)
    if not g.type_of(a).is_float and not g.type_of(b).is_float:
        a, b = floating(g, a), floating(g, b)
    return g.emit("div", *_broadcast(g, a, b))


def _neg(g: Reader, a: Value) -> Value:
    return _affine(g, a, -1, 0)


def readers_of(
    functions: Iterable[Function],
) -> tuple[dict[type[nn.Module], Callable[..., Value]], dict[Any, Callable[..., Value]]]:
    """How functions of the table are spelled: as modules, and as calls."""
    modules, calls = {}, {}
    for function in functions:
        for spelled in function.spelled:
            if isinstance(spelled, type):
                modules[spelled] = _activation_module(function.name)
            else:
                calls[spelled] = _activation(function.name)
    return modules, calls


_MODULES, _CALLS = readers_of(TABLE.values())
SPELLED: Spelled = {
    **_MODULES,
    **_CALLS,
    **{
        method: _activation(name)
        for name in TABLE
        for method in (name, f"{name}_")
        if hasattr(torch.Tensor, method)
    },
    **dict.fromkeys((torch.mean, "mean"), _reduce("mean")),
    **dict.fromkeys((torch.sum, "sum"), _reduce("sum")),
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), _add),
    **dict.fromkeys((operator.sub, operator.isub, torch.sub, "sub", "sub_"), _sub),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, "mul", "mul_"), _mul),
    **dict.fromkeys((operator.truediv, operator.itruediv, torch.div, "div", "div_"), _div),
    operator.neg: _neg,
}
