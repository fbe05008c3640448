"""Ops that plantune has no rule for: torch's own overloads, and their backward passes.

An overload is named as torch names it (aten.gelu.default). Its attributes hold the arguments as
JSON, with the places of tensors, so that the node means the same in every process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from plantune.base.canonical import Attrs, canonical
from plantune.errors import InvalidGraph
from plantune.graph.memory import in_rows
from plantune.graph.ops.base import Domain, Gradient, Op, Types
from plantune.graph.ops.history import HISTORY, owned, remembered, row_major
from plantune.graph.ops.overload_backward import (
    BACKWARD,
    DRAWS,
    WANTED,
    OverloadBackward,
    emit_backward,
    has_gradient,
    unread,
)
from plantune.graph.types import DTYPES, TensorType, dtype_name

ARGUMENTS, DTYPE = "arguments", "dtype"
# An argument that is the tensor at that place, or the dtype of `Attrs[DTYPE]`.
TENSOR, OF_ATTRS = "tensor", "same"
FORMATS = {str(f): f for f in (torch.contiguous_format, torch.channels_last, torch.preserve_format)}
# What JSON does not have: its type, how it is read and how it is written.
WRITTEN: Mapping[str, tuple[type, Callable[[str], Any], Callable[[Any], str]]] = {
    "dtype": (torch.dtype, DTYPES.__getitem__, dtype_name),
    "memory_format": (torch.memory_format, FORMATS.__getitem__, str),
    "float": (float, float, str),  # infinite, or none
}
# Where tensors are is for the program to say.
PLACES = ("device", "layout", "pin_memory")


class OverloadOp(Op):
    """Runs the overload. Results that share memory with an input are copied: every value is new."""

    multiplies = True  # for all that is known

    def __init__(self, overload: torch._ops.OpOverload) -> None:
        self.overload = overload
        self.name = str(overload)
        self.arity = None

    def infer(self, inputs: Sequence[TensorType], attrs: Attrs) -> Types:
        made = _inferred(self, tuple(inputs), attrs, torch.get_default_dtype())
        return (*made, HISTORY) if WANTED in attrs else made

    def evaluate(self, inputs: Sequence[Tensor], attrs: Attrs) -> tuple[Tensor, ...]:
        return self.evaluate_loosely(inputs, attrs, ())

    def evaluate_loosely(
        self, inputs: Sequence[Tensor], attrs: Attrs, loose: Collection[int]
    ) -> tuple[Tensor, ...]:
        """As `evaluate`, but results at the places in `loose` are as torch makes them: of any
        strides, or views of an input.
        """
        if DRAWS in attrs:
            inputs = row_major(inputs)
        if WANTED not in attrs:
            return owned(self.results(inputs, attrs), inputs, loose=loose)
        types = [TensorType(tuple(x.shape), dtype_name(x.dtype)) for x in inputs]
        run = partial(self.results, attrs=attrs)
        made = remembered(run, inputs, attrs[WANTED], unread(self, types))
        return (*owned(made[:-1], inputs, loose=loose), made[-1])

    def viewed(self, attrs: Attrs) -> int | None:
        """The place of the input that all results may be views of; None if there is none."""
        schema = self.overload._schema
        aliases = [argument for argument in schema.arguments if argument.alias_info is not None]
        results = [result.alias_info for result in schema.returns]
        views = all(info is not None and not info.is_write for info in results)
        if len(aliases) != 1 or not results or not views:
            return None
        tensor = json.loads(attrs[ARGUMENTS]).get(aliases[0].name)
        return tensor.get(TENSOR) if isinstance(tensor, dict) else None

    def results(self, inputs: Sequence[Tensor], attrs: Attrs) -> list[Tensor]:
        """The tensors that the overload returns for these inputs, one after the other."""
        return _tensors_of(self.call(inputs, attrs))

    def call(self, inputs: Sequence[Tensor], attrs: Attrs) -> Any:
        """What the overload returns for these inputs."""
        if self.name == AVERAGE:
            # Its gradient in channels_last is wrong on a GPU where there is padding (torch 2.11).
            inputs = [in_rows(x) for x in inputs]
        args, named = self.arguments(inputs, attrs, inputs[0].device if inputs else None)
        return self.overload(*args, **named)

    def arguments(
        self, inputs: Sequence[Any], attrs: Attrs, device: torch.device | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those of a call by their place and by name. Whatever is made is made on `device`."""
        given = {
            name: _argument(value, inputs, attrs)
            for name, value in json.loads(attrs[ARGUMENTS]).items()
        }
        arguments = self.overload._schema.arguments
        if device is not None and any(argument.name == "device" for argument in arguments):
            given["device"] = device
        named = {a.name: given[a.name] for a in arguments if a.kwarg_only and a.name in given}
        places = [at for at, a in enumerate(arguments) if a.name in given and not a.kwarg_only]
        args = (
            given.get(a.name, a.default_value) for a in arguments[: max(places, default=-1) + 1]
        )
        return tuple(args), named

    def reads(self, attrs: Attrs) -> bool:
        return WANTED in attrs or f'{{"{TENSOR}":' in attrs[ARGUMENTS]

    def differentiates(self, wanted: Sequence[int], inputs: Types, attrs: Attrs) -> bool:
        floats = tuple(at for at in wanted if inputs[at].is_float)
        return bool(floats) and has_gradient(self, tuple(inputs), attrs, floats)

    def gradient(self, grad: Gradient) -> tuple[str | None, ...]:
        return emit_backward(self, grad)

    def domain(self, position: int, inputs: Sequence[TensorType], attrs: Attrs) -> Domain:
        """Integers are taken for places in the first tensor of numbers."""
        if inputs[position].is_float:
            return Domain(DOMAINS.get((self.name, position), "real"))
        sizes = next((t.shape for t in inputs if t.is_float and t.shape), (2,))
        return Domain("index", max(min(sizes), 1) if self.name != EMBEDDING else sizes[0])


CONCAT = "aten.cat.default"
SOFTMAX = "aten.softmax.int"
MATMUL, ROLL = "aten.matmul.default", "aten.roll.default"
SELECT, UNBIND = "aten.select.int", "aten.unbind.int"
EMBEDDING = "aten.embedding.default"
AVERAGE = "aten.avg_pool2d.default"
# What numbers some take, by the place of the input.
DOMAINS: Mapping[tuple[str, int], str] = {
    ("aten.bernoulli.default", 0): "unit",
    ("aten.bernoulli.Tensor", 1): "unit",
    ("aten.binomial.default", 0): "positive",
    ("aten.binomial.default", 1): "unit",
    ("aten.multinomial.default", 0): "positive",
    ("aten.normal.float_Tensor", 0): "positive",
    ("aten.normal.Tensor_Tensor", 1): "positive",
    ("aten.poisson.default", 0): "positive",
}


def joined(attrs: Attrs, inputs: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """The axis of a concatenation, and what it joins, in order: an input may be there twice."""
    given = json.loads(attrs[ARGUMENTS])
    return given.get("dim", 0), tuple(inputs[tensor[TENSOR]] for tensor in given["tensors"])


def _tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in _tensors_of(item)]
    return []


@lru_cache(4096)
def _inferred(
    op: OverloadOp, inputs: tuple[TensorType, ...], attrs: Attrs, default: torch.dtype
) -> Types:
    """Of what is asked for without a dtype, `default` is what torch makes now."""
    tensors = [torch.empty(t.shape, dtype=t.torch_dtype, device="meta") for t in inputs]
    try:
        made = _tensors_of(op.call(tensors, attrs))
    except (RuntimeError, TypeError, ValueError, LookupError, NotImplementedError) as error:
        said = str(error).strip().partition("\n")[0]
        raise InvalidGraph(
            f"{op.name} does not take {', '.join(map(str, inputs))}: {said}"
        ) from error
    return tuple(TensorType(tuple(made.shape), dtype_name(made.dtype)) for made in made)


def attributes(
    overload: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    place: Callable[[Any], int | None],
) -> Attrs:
    """The attributes of a call. `place` gives the place of a tensor among the inputs, None of
    another value. Raises InvalidGraph for an argument that cannot be kept.
    """
    arguments = overload._schema.arguments
    given = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
    floats = _floats(given.get("dtype"))
    kept = {
        argument.name: _kept(given[argument.name], place)
        for argument in arguments
        if argument.name in given and argument.name not in PLACES
        if not (argument.has_default_value() and given[argument.name] == argument.default_value)
    }
    if floats is None:
        return Attrs({ARGUMENTS: canonical(kept)})
    # Where `Node.evaluate` finds it: a reference computes in other floats.
    return Attrs({ARGUMENTS: canonical({**kept, "dtype": {OF_ATTRS: True}}), DTYPE: floats})


def _floats(dtype: Any) -> str | None:
    return dtype_name(dtype) if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def _kept(value: Any, place: Callable[[Any], int | None]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_kept(item, place) for item in value]
    at = place(value)
    if at is not None:
        return {TENSOR: at}
    for kind, (type_, _, write) in WRITTEN.items():
        if isinstance(value, type_) and not (isinstance(value, float) and math.isfinite(value)):
            return {kind: write(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InvalidGraph(f"an argument of type {type(value).__name__}")


def _argument(value: Any, inputs: Sequence[Tensor], attrs: Attrs) -> Any:
    if isinstance(value, list):
        return [_argument(item, inputs, attrs) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, what),) = value.items()
    if kind == TENSOR:
        return inputs[what]
    return DTYPES[attrs[DTYPE]] if kind == OF_ATTRS else WRITTEN[kind][1](what)


@cache
def overload_op(name: str) -> Op | None:
    """The op of an overload or of its backward pass; None if torch has no such overload."""
    if name.startswith(BACKWARD):
        forward = overload_op(name.removeprefix(BACKWARD))
        return OverloadBackward(forward) if isinstance(forward, OverloadOp) else None
    parts = name.split(".")
    if len(parts) != 3:
        return None
    space, packet, overload = parts
    try:
        return OverloadOp(getattr(getattr(getattr(torch.ops, space), packet), overload))
    except (AttributeError, RuntimeError):
        return None
