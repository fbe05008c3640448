"""Values as JSON and back, by the types that a function or a dataclass names.

A class with a `to_json` of its own is asked for it, and read by its `from_json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import repeat
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from plantune.base.canonical import Attrs

TYPE = "type"  # which class of a union it is


def to_json(value: Any) -> Any:
    """What JSON can hold of a value; the order of a mapping stays."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return {TYPE: type(value).__name__, **fields_to_json(value)}
    if isinstance(value, Attrs):
        return dict(value)
    if isinstance(value, Mapping):
        return [[key, to_json(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple, frozenset)):
        return [*map(to_json, sorted(value) if isinstance(value, frozenset) else value)]
    return value


def fields_to_json(value: Any, kind: Any = None) -> dict[str, Any]:
    """The fields of a dataclass, or those that it has as one of another `kind`."""
    return {item.name: to_json(getattr(value, item.name)) for item in fields(kind or value)}


def from_json(type_: Any, data: Any) -> Any:
    """The value of `to_json`; raises KeyError, TypeError or ValueError for other data."""
    kind, inside = get_origin(type_) or type_, get_args(type_)
    if kind is UnionType:
        return from_json(_member(inside, data), data)
    if hasattr(kind, "from_json"):
        return kind.from_json(data)
    if isinstance(kind, type) and is_dataclass(kind):
        return fields_from_json(kind, {of: item for of, item in data.items() if of != TYPE})
    if kind is Attrs:
        return Attrs(data)
    if kind is Mapping:
        return {key: from_json(inside[1], item) for key, item in data}
    return _items(kind, inside, data) if kind in (list, tuple, Sequence, frozenset) else data


def _items(kind: Any, inside: Sequence[Any], data: Any) -> Any:
    several = kind is not tuple or inside[-1] is ...
    types = repeat(inside[0], len(data)) if several else inside
    items = [from_json(of, item) for of, item in zip(types, data, strict=True)]
    return tuple(items) if kind is Sequence else kind(items)


def fields_from_json(kind: Any, data: Any) -> Any:
    """The dataclass of `fields_to_json`; raises as `from_json` does, for a field too many, too."""
    hints, names = _hints(kind), dict.fromkeys([*(item.name for item in fields(kind)), *data])
    return kind(**{name: from_json(hints[name], data[name]) for name in names})


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _member(types: Sequence[Any], data: Any) -> Any:
    if data is None:
        return NoneType
    present = [type_ for type_ in types if type_ is not NoneType]
    named = data.get(TYPE) if isinstance(data, dict) else None
    return next((type_ for type_ in present if type_.__name__ == named), present[0])
