"""Refuses what a public function cannot take, in one line that says of which argument, what it may
be and what was got.

Raises TypeError for another kind of object, ValueError for one that is not among those allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeGuard

from plantune.base.nearest import hint

MOST_SHOWN = 80
PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
CONTAINERS = (list, tuple, dict, set, frozenset)


def require_kind(name: str, value: object, wanted: str, *, fits: bool) -> None:
    """`wanted` completes "must be"."""
    if not fits:
        raise TypeError(f"{name} must be {wanted}, got {shown(value)}")


def require_value(name: str, value: object, wanted: str, *, fits: bool) -> None:
    if not fits:
        raise ValueError(f"{name} must be {wanted}, got {shown(value)}")


def require_flag(name: str, value: object) -> None:
    require_kind(name, value, "True or False", fits=isinstance(value, bool))


def require_one_of(name: str, value: object, known: Sequence[str]) -> None:
    if not (isinstance(value, str) and value in known):
        wanted, close = ", ".join(known), hint(value, known) if isinstance(value, str) else ""
        raise ValueError(f"{name} must be one of {wanted}, got {shown(value)}{close}")


def require_whole(name: str, value: object, least: int) -> None:
    wanted = f"a whole number, {least} or more"
    require_kind(name, value, wanted, fits=isinstance(value, int) and not isinstance(value, bool))
    require_value(name, value, wanted, fits=value >= least)  # type: ignore[operator]


def require_number(name: str, value: Any, wanted: str, allows: Callable[[Any], bool]) -> None:
    """`allows` must be false of NaN."""
    require_kind(name, value, wanted, fits=is_number(value))
    require_value(name, value, wanted, fits=allows(value))


def is_number(value: object) -> TypeGuard[float]:
    """NumPy's scalars, too; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def shown(value: object) -> str:
    """What was got, in a few words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if not _has_a_short_text(value):
        name = type(value).__name__
        return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def _has_a_short_text(value: object) -> bool:
    """Not a tensor, whose numbers may be on a GPU, nor what holds one."""
    kind = type(value)
    if isinstance(value, CONTAINERS):
        items = (*value.items(),) if isinstance(value, dict) else value
        return all(map(_has_a_short_text, items))
    return kind in PLAIN or (kind.__module__, kind.__name__) == ("torch", "dtype")
