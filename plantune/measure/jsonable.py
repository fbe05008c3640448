"""Values as JSON and back, by the types that a function or a dataclass names.

A class with a `to_json` of its own is asked for it, and read by its `from_json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

TYPE = "type"  # which class of a union it is


def to_json(value: Any) -> Any:
    """What JSON can hold of a value; the order of a mapping stays."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        named = {item.name: to_json(getattr(value, item.name)) for item in fields(value)}
        return {TYPE: type(value).__name__, **named}
    if isinstance(value, Mapping):
        return [[key, to_json(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [*map(to_json, value)]
    return value


def from_json(type_: Any, data: Any) -> Any:
    """The value of `to_json`; raises KeyError, TypeError or ValueError for other data."""
    kind, inside = get_origin(type_) or type_, get_args(type_)
    if kind is UnionType:
        return from_json(_member(inside, data), data)
    if hasattr(kind, "from_json"):
        return kind.from_json(data)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{of: from_json(hints[of], item) for of, item in data.items() if of != TYPE})
    if kind is Mapping:
        return {key: from_json(inside[1], item) for key, item in data}
    if kind in (list, tuple, Sequence):
        items = (from_json(inside[0], item) for item in data)
        return [*items] if kind is list else tuple(items)
    return data


def _member(types: Sequence[Any], data: Any) -> Any:
    if data is None:
        return NoneType
    present = [type_ for type_ in types if type_ is not NoneType]
    named = data.get(TYPE) if isinstance(data, dict) else None
    return next((type_ for type_ in present if type_.__name__ == named), present[0])
