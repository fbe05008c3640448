"""Ops that plantune has no rule for: torch's own overloads, and their backward passes.

An overload is named as torch names it (aten.gelu.default). Its attributes hold the arguments as
JSON, with the places of tensors, so that the node means the same in every process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from plantune.canonical import Attrs, canonical
from plantune.errors import InvalidGraph
from plantune.graph.ops.base import Domain, Gradient, Op, Types
from plantune.graph.types import DTYPES, TensorType, dtype_name

BACKWARD = "backward_of_"
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

    def __init__(self, overload: torch._ops.OpOverload) -> None:
        self.overload = overload
        self.name = str(overload)
        self.arity = None

    def infer(self, inputs: Sequence[TensorType], attrs: Attrs) -> Types:
        return _inferred(self, tuple(inputs), attrs)

    def evaluate(self, inputs: Sequence[Tensor], attrs: Attrs) -> tuple[Tensor, ...]:
        results = _tensors_of(self.call(inputs, attrs))
        held = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        return tuple(_own(result, held) for result in results)

    def call(self, inputs: Sequence[Tensor], attrs: Attrs) -> Any:
        """What the overload returns for these inputs."""
        given = {
            name: _argument(value, inputs, attrs)
            for name, value in json.loads(attrs[ARGUMENTS]).items()
        }
        arguments = self.overload._schema.arguments
        if inputs and any(argument.name == "device" for argument in arguments):
            given["device"] = inputs[0].device
        named = {a.name: given[a.name] for a in arguments if a.kwarg_only and a.name in given}
        places = [at for at, a in enumerate(arguments) if a.name in given and not a.kwarg_only]
        return self.overload(
            *(given.get(a.name, a.default_value) for a in arguments[: max(places, default=-1) + 1]),
            **named,
        )

    def gradient(self, grad: Gradient) -> tuple[str | None, ...]:
        wanted = tuple(at for at in range(len(grad.inputs)) if grad.needs(at))
        given = tuple(at for at, name in enumerate(grad.output_gradients) if name is not None)
        names = [name for name in grad.output_gradients if name is not None]
        made = grad.emit_all(
            BACKWARD + self.name, *grad.inputs, *names, **grad.attrs, wanted=wanted, given=given
        )
        found = dict(zip(wanted, made, strict=True))
        return tuple(found.get(at) for at in range(len(grad.inputs)))

    def domain(self, position: int, inputs: Sequence[TensorType], attrs: Attrs) -> Domain:
        """Integers are taken for places in the first tensor of numbers."""
        if inputs[position].is_float:
            return Domain()
        sizes = next((t.shape for t in inputs if t.is_float and t.shape), (2,))
        return Domain("index", max(min(sizes), 1) if self.name != EMBEDDING else sizes[0])


EMBEDDING = "aten.embedding.default"


class OverloadBackward(Op):
    """Gradients of an overload by torch's own rule, which runs the overload again.

    Inputs are those of the overload, then the gradients of the outputs in `given`; outputs are the
    gradients of the inputs in `wanted`.
    """

    def __init__(self, forward: OverloadOp) -> None:
        self.forward = forward
        self.name = BACKWARD + forward.name
        self.arity = None

    def infer(self, inputs: Sequence[TensorType], attrs: Attrs) -> Types:
        return tuple(TensorType(inputs[at].shape, inputs[at].dtype) for at in attrs["wanted"])

    def evaluate(self, inputs: Sequence[Tensor], attrs: Attrs) -> tuple[Tensor, ...]:
        count = len(inputs) - len(attrs["given"])
        wanted = attrs["wanted"]
        with torch.inference_mode(False), torch.enable_grad():
            sources = [
                tensor.detach().clone() if tensor.is_inference() else tensor.detach()
                for tensor in inputs[:count]
            ]
            for at in wanted:
                sources[at].requires_grad_()
            results = _tensors_of(self.forward.call(sources, attrs))
            pairs = [
                (results[at], gradient)
                for at, gradient in zip(attrs["given"], inputs[count:], strict=True)
                if results[at].requires_grad
            ]
            made = _gradients(pairs, [sources[at] for at in wanted])
        held = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        return tuple(_own(gradient, held) for gradient in made)

    def domain(self, position: int, inputs: Sequence[TensorType], attrs: Attrs) -> Domain:
        count = len(inputs) - len(attrs["given"])
        if position >= count:
            return Domain()
        return self.forward.domain(position, inputs[:count], attrs)


def _gradients(pairs: list[tuple[Tensor, Tensor]], sources: list[Tensor]) -> list[Tensor]:
    if not pairs:
        return [torch.zeros_like(source) for source in sources]
    outputs, gradients = zip(*pairs, strict=True)
    made = torch.autograd.grad(outputs, sources, gradients, allow_unused=True)
    return [
        torch.zeros_like(source) if gradient is None else gradient.detach()
        for source, gradient in zip(sources, made, strict=True)
    ]


def _own(result: Tensor, held: set[int]) -> Tensor:
    shared = result.untyped_storage().data_ptr() in held
    dense = result.is_contiguous() or result.is_contiguous(memory_format=torch.channels_last)
    whole = result.untyped_storage().nbytes() == result.numel() * result.element_size()
    kept = dense and whole and not shared
    return result if kept else result.clone(memory_format=torch.contiguous_format)


def _tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in _tensors_of(item)]
    return []


@lru_cache(4096)
def _inferred(op: OverloadOp, inputs: tuple[TensorType, ...], attrs: Attrs) -> Types:
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
