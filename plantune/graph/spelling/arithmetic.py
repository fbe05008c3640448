"""How torch spells arithmetic, activations and reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch

from plantune.graph.ops.functions import FUNCTIONS, Function
from plantune.graph.spelling.casts import floating, promoted
from plantune.graph.spelling.reader import NotRead, Reader, Value

Shape = tuple[int, ...]


def _activation(overload: str, functions: Sequence[Function]) -> Callable[..., Value]:
    """Reads an overload as the one of `functions` that has its arguments."""
    _, packet, name = overload.split(".")
    schema = getattr(getattr(torch.ops.aten, packet), name)._schema.arguments[1:]

    def read(g: Reader, x: Value, *args: Any, **kwargs: Any) -> Value:
        given = tuple(args) + tuple(
            kwargs.get(argument.name, argument.default_value) for argument in schema[len(args) :]
        )
        names = [f.name for f in functions if given in ((), f.arguments)]
        if not names or not g.type_of(x).is_float:
            raise NotRead("an activation of integers, or with other numbers than the table's")
        return g.emit(names[0], x)

    return read


def _reduce(op: str) -> Callable[..., Value]:
    def read(
        g: Reader, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Value:
        rank = len(g.shape(x))
        if dtype is not None or not g.type_of(x).is_float or not rank:
            raise NotRead("a reduction in another dtype")
        dims = range(rank) if dim is None or dim == [] else dim
        return g.emit(op, x, dims=tuple(sorted(axis % rank for axis in dims)), keepdim=keepdim)

    return read


def _broadcast(g: Reader, a: Value, b: Value) -> tuple[Value, Value]:
    """Both operands in the dtype of the result, `a` also in its shape."""
    a, b = promoted(g, a, b)
    shape = _shape_of_both(g.shape(a), g.shape(b))
    return (a if g.shape(a) == shape else g.emit("broadcast_to", a, shape=shape)), b


def _shape_of_both(a: Shape, b: Shape) -> Shape:
    pairs = [*zip_longest(reversed(a), reversed(b), fillvalue=1)]
    return tuple(y if x == 1 else x for x, y in reversed(pairs))


def _affine(g: Reader, x: Value, alpha: Any, beta: Any) -> Value:
    if any(isinstance(number, (bool, complex)) for number in (alpha, beta)):
        raise NotRead("arithmetic with a bool or a complex number")
    if isinstance(alpha, float) or isinstance(beta, float):
        x = floating(g, x)
    number = int if g.type_of(x).dtype == "int64" else float  # counters, as batch norms keep them
    return g.emit("affine", x, alpha=number(alpha), beta=number(beta))


def _add(g: Reader, a: Value, b: Any, alpha: Any = 1) -> Value:
    if alpha != 1:
        raise NotRead("an addition with alpha")
    if not isinstance(b, Value):
        return _affine(g, a, 1, b)
    return g.emit("add", *_broadcast(g, *_larger_first(g, a, b)))


def _sub(g: Reader, a: Value, b: Any, alpha: Any = 1) -> Value:
    if alpha != 1:
        raise NotRead("a subtraction with alpha")
    if not isinstance(b, Value):
        return _affine(g, a, 1, -b)
    return g.emit("sub", *_broadcast(g, a, b))


def _rsub(g: Reader, a: Value, b: Any, alpha: Any = 1) -> Value:
    if alpha != 1:
        raise NotRead("a subtraction with alpha")
    return _sub(g, b, a) if isinstance(b, Value) else _affine(g, a, -1, b)


def _mul(g: Reader, a: Value, b: Any) -> Value:
    if not isinstance(b, Value):
        return _affine(g, a, b, 0)
    return g.emit("mul", *_broadcast(g, *_larger_first(g, a, b)))


def _div(g: Reader, a: Value, b: Any) -> Value:
    if not isinstance(b, Value):
        return _by_number(g, a, b)
    if not g.type_of(a).is_float and not g.type_of(b).is_float:
        a, b = floating(g, a), floating(g, b)
    return g.emit("div", *_broadcast(g, a, b))


def _by_number(g: Reader, a: Value, b: Any) -> Value:
    if not b:
        raise NotRead("a division by zero")
    if g.is_stepped():  # on a CPU torch divides, and is a bit off from a product
        raise NotRead("a quotient whose last bit counts")
    return _affine(g, a, 1 / b, 0)


def _larger_first(g: Reader, a: Value, b: Value) -> tuple[Value, Value]:
    smaller = len(g.shape(a)) < len(g.shape(b)) or g.type_of(a).numel < g.type_of(b).numel
    return (b, a) if smaller else (a, b)


def _neg(g: Reader, a: Value) -> Value:
    return _affine(g, a, -1, 0)


def readers_of(functions: Iterable[Function]) -> dict[str, Callable[..., Value]]:
    """How functions of the table are spelled."""
    spelled: dict[str, list[Function]] = {}
    for function in functions:
        for overload in function.spelled:
            spelled.setdefault(overload, []).append(function)
    return {overload: _activation(overload, those) for overload, those in spelled.items()}


OVERLOADS: dict[str, Callable[..., Any]] = {
    **readers_of(FUNCTIONS.values()),
    "aten.mean.default": _reduce("mean"),
    "aten.mean.dim": _reduce("mean"),
    "aten.sum.default": _reduce("sum"),
    "aten.sum.dim_IntList": _reduce("sum"),
    "aten.add.Tensor": _add,
    "aten.add.Scalar": _add,
    "aten.sub.Tensor": _sub,
    "aten.sub.Scalar": _sub,
    "aten.rsub.Tensor": _rsub,
    "aten.rsub.Scalar": _rsub,
    "aten.mul.Tensor": _mul,
    "aten.mul.Scalar": _mul,
    "aten.div.Tensor": _div,
    "aten.div.Scalar": _div,
    "aten.neg.default": _neg,
}
