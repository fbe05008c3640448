"""Values in tuples, lists, dicts, dataclasses and whatever else torch knows to be made of others.

As torch.utils._pytree, which takes dataclasses and results of Hugging Face's kind for plain objects
unless somebody has registered them.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from plantune.graph.types import TensorType

# What tells a value from others of its type, its parts, and how one is made of other parts.
Opened = tuple[Hashable, Sequence[Any], Callable[[Sequence[Any]], Any]]

# Looked at first: most values are such.
# A packed sequence is one value: its sizes decide how it is read.
PLAIN = (Tensor, TensorType, type(None), bool, int, float, str, torch.Size, PackedSequence)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` applied to everything in it that is not made of other values."""
    opened = None if type(value) is Tensor else _opened(value)
    if opened is None:
        return function(value)
    _, parts, build = opened
    return build([mapped(function, part) for part in parts])


def leaves(value: Any) -> list[Any]:
    """Everything in `value` that is not made of other values, in order."""
    found: list[Any] = []
    mapped(found.append, value)
    return found


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def kind_of(value: Any, of_leaf: Callable[[Any], Hashable]) -> Any:
    """Equal for values that are built alike of leaves for which `of_leaf` gives the same."""
    opened = None if type(value) is Tensor else _opened(value)
    if opened is None:
        return of_leaf(value)
    context, parts, _ = opened
    return type(value), context, *[kind_of(part, of_leaf) for part in parts]


def _opened(value: Any) -> Opened | None:
    """None of a value that has no parts."""
    kind = type(value)
    known = _KNOWN.get(kind)
    if known is not None:
        return known(value)
    if kind in _pytree.SUPPORTED_NODES:
        return _registered(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _result(value) if isinstance(value, dict) else _dataclass(value)
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return _named(value) if hasattr(value, "_fields") else ((), value, kind)
    return None


def _named(value: Any) -> Opened:
    kind = type(value)
    return (), value, lambda parts: kind(*parts)


def _dict(value: Mapping[Any, Any]) -> Opened:
    keys, kind = tuple(value), type(value)
    return keys, tuple(value.values()), lambda parts: kind(zip(keys, parts, strict=True))  # type: ignore[call-arg]


def _defaultdict(value: defaultdict[Any, Any]) -> Opened:
    keys, make = tuple(value), value.default_factory
    build = lambda parts: defaultdict(make, zip(keys, parts, strict=True))  # noqa: E731
    return (keys, make), tuple(value.values()), build


def _dataclass(value: Any) -> Opened:
    """With what `__post_init__` has set, which is not run again."""
    kind = type(value)
    slots = {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    held = {**slots, **getattr(value, "__dict__", {})}

    def build(parts: Sequence[Any]) -> Any:
        made = object.__new__(kind)
        for name, part in zip(held, parts, strict=True):
            object.__setattr__(made, name, part)
        return made

    return tuple(held), tuple(held.values()), build


def _result(value: Any) -> Opened:
    """A dict that is a dataclass too, and keeps both alike."""
    kind, held = type(value), {f.name: getattr(value, f.name) for f in fields(value)}
    build = lambda parts: kind(**dict(zip(held, parts, strict=True)))  # noqa: E731
    return tuple(held), tuple(held.values()), build


def _registered(value: Any) -> Opened:
    node = _pytree.SUPPORTED_NODES[type(value)]
    parts, context = node.flatten_fn(value)
    return repr(context), parts, lambda new: node.unflatten_fn([*new], context)


_KNOWN: Mapping[type, Callable[[Any], Opened | None]] = {
    tuple: lambda value: ((), value, tuple),
    list: lambda value: ((), value, list),
    dict: _dict,
    OrderedDict: _dict,
    defaultdict: _defaultdict,
    **dict.fromkeys(PLAIN, lambda value: None),
}
