"""Fields of C structs, told in a line."""

from __future__ import annotations

import ctypes
from typing import Any


def fields(text: str, **types: Any) -> tuple[tuple[str, Any], ...]:
    """Those of a `ctypes.Structure`: `"x y count:int grid:uint[3]"` has two pointers, a number and
    an array. A word of `types` is a type of one's own.
    """
    found = []
    for part in text.split():
        name, _, kind = part.partition(":")
        word, _, count = kind.partition("[")
        type_ = types[word] if word in types else getattr(ctypes, f"c_{word or 'void_p'}")
        found.append((name, type_ * int(count[:-1]) if count else type_))
    return tuple(found)
