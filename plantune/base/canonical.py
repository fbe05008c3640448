"""Frozen values with one canonical JSON form, and digests of it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

Scalar = bool | int | float | str
Attr = Scalar | tuple[int, ...]


class Attrs(Mapping[str, Attr]):
    """A small immutable, hashable mapping: the attributes of an op or the config of a kernel."""

    __slots__ = ("_exact", "_hash", "_values")

    def __init__(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        merged = {**(values or {}), **named}
        self._values = {key: _frozen(key, merged[key]) for key in sorted(merged)}
        # 1 == 1.0 == True and 0.0 == -0.0 in Python, but they are different attributes.
        self._exact = tuple((key, type(v), repr(v)) for key, v in self._values.items())
        self._hash = hash(self._exact)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attrs) and self._exact == other._exact

    def __reduce__(self) -> tuple[type[Attrs], tuple[dict[str, Attr]]]:
        # The hash of a text is another one in each process.
        return Attrs, (self._values,)

    def __repr__(self) -> str:
        return "Attrs(" + ", ".join(f"{key}={value!r}" for key, value in self._values.items()) + ")"


def _frozen(key: str, value: Any) -> Attr:
    if isinstance(value, (list, tuple)):
        if not all(type(item) is int for item in value):
            raise TypeError(f"{key}: a sequence holds integers only, got {value!r}")
        return tuple(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key}: must be finite, got {value!r}")
    if isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{key}: must be a number, a string or a tuple of integers, got {value!r}")


def words(text: str) -> tuple[str, ...]:
    """The words of a text: a table of names in few lines."""
    return tuple(text.split())


def canonical(value: Any) -> str:
    """The one JSON text of `value`: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no canonical JSON form")


def digest(value: Any) -> str:
    """The sha256 of the canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()
