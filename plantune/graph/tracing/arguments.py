"""The arguments of one call, with types in the place of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from plantune.errors import InvalidGraph, UnsupportedModule
from plantune.graph.nested import leaves, mapped
from plantune.graph.types import TensorType, dtype_name

# What a module may be called with besides tensors: values that tell nothing but themselves.
CONSTANTS = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype, torch.device)
MOST_TEXT = 40  # letters of a constant


@dataclass(frozen=True)
class Arguments:
    """Each tensor is an input of the layer graph, in order; all else is a part of what the graph
    computes.

    `examples` are the values of tensors of integers, None of others: not all integers make sense.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    examples: tuple[Tensor | None, ...] = field(default=(), compare=False)
    # Under which the call is, if any: the kind of device, and the dtype of products.
    autocast: tuple[str, torch.dtype] | None = None

    @staticmethod
    def of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Of a call, by the places of its arguments in the module's forward: what is given by name
        and what is given by place are the same. Raises InvalidGraph for a tensor of unknown type.
        """
        try:
            return ordered(module, args, kwargs)[0]
        except InvalidGraph as error:  # such as complex numbers
            raise UnsupportedModule(
                f"{type(module).__name__} is called with a tensor of another kind: {error}"
            ) from error

    @cached_property
    def types(self) -> tuple[TensorType, ...]:
        """Those of the graph's inputs."""
        held = leaves((self.args, dict(self.kwargs)))
        return tuple(leaf for leaf in held if isinstance(leaf, TensorType))

    @property
    def constants(self) -> tuple[Any, ...]:
        """What is not a tensor."""
        held = leaves((self.args, dict(self.kwargs)))
        return tuple(leaf for leaf in held if not isinstance(leaf, TensorType))

    def text(self, *, dtypes: bool = False) -> str:
        """For people: the shape of each tensor, and constants other than None."""
        tensors = (f"{t.shape} {t.dtype}" if dtypes else str(t.shape) for t in self.types)
        more = (repr(leaf)[:MOST_TEXT] for leaf in self.constants if leaf is not None)
        return ", ".join([*tensors, *more])

    def as_written(self) -> str:
        """For people: each argument in its place or by its name, in the structure that it has."""
        args, kwargs = mapped(_shown, (self.args, dict(self.kwargs)))
        named = (f"{name}={value!r}" for name, value in kwargs.items())
        return f"({', '.join([*map(repr, args), *named])})"

    def given(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Such a call with these tensors."""
        left = iter(tensors)
        put: Callable[[Any], Any] = lambda leaf: (  # noqa: E731
            next(left) if isinstance(leaf, TensorType) else leaf
        )
        return mapped(put, self.args), mapped(put, dict(self.kwargs))


class _Bare(str):
    """Shows itself without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _shown(leaf: Any) -> Any:
    return _Bare(f"{leaf.shape} {leaf.dtype}") if isinstance(leaf, TensorType) else leaf


def ordered(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Arguments, tuple[int, ...]]:
    """The arguments, and of each input of the graph which of the call's tensors it is."""
    numbers, held = count(), []

    def numbered(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        held.append(leaf)
        return _Place(next(numbers))

    places = mapped(numbered, (tuple(args), dict(kwargs)))
    args, kwargs = _bound(module, *places)
    order = [leaf.at for leaf in leaves((args, kwargs)) if isinstance(leaf, _Place)]
    typed = mapped(
        lambda leaf: type_of(held[leaf.at]) if isinstance(leaf, _Place) else leaf, (args, kwargs)
    )
    examples = tuple(_example(held[at]) for at in order)
    return Arguments(typed[0], typed[1], examples), tuple(order)


def type_of(tensor: Tensor) -> TensorType:
    """The type of a tensor that is called with, in the layout that it has."""
    channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    layout = "nhwc" if channels_last and not tensor.is_contiguous() else "nchw"
    return TensorType(tuple(tensor.shape), dtype_name(tensor.dtype), layout)


class _Place:
    """Which of the tensors of a call, in the order in which it holds them."""

    def __init__(self, at: int) -> None:
        self.at = at


def _bound(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # The call itself says what is wrong with it.
        return args, dict(kwargs)
    return bound.args, bound.kwargs


def _example(tensor: Tensor) -> Tensor | None:
    """Pixels may be any number, and are large."""
    if tensor.is_floating_point() or tensor.dtype == torch.uint8:
        return None
    return tensor.detach().clone()
