"""How values are written in rendered sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Long(int):
    """A number of 64 bits in C++."""


CXX_TYPES = {bool: "bool", int: "int", Long: "long long", float: "float"}


def struct(name: str, own: str = "", /, **members: Any) -> str:
    """A struct of constants in C++, and of types where a member is text; its `own` lines last."""
    lines = (f"  {_member(word, value)}\n" for word, value in members.items())
    return f"struct {name} {{\n{''.join(lines)}{own}}};\n"


def _member(word: str, value: Any) -> str:
    if isinstance(value, str):
        return f"using {word} = {value};"
    if isinstance(value, (list, tuple)):
        values = ", ".join(map(cxx, value))
        return f"static constexpr {CXX_TYPES[type(value[0])]} {word}[] = {{{values}}};"
    return f"static constexpr {CXX_TYPES[type(value)]} {word} = {cxx(value)};"


def cxx(value: float) -> str:
    """A number as C++ writes it."""
    return f"{value!r}f" if isinstance(value, float) else str(value).lower()


def cxx_bool(holds: object) -> str:
    return "true" if holds else "false"


def cxx_bools(flags: Mapping[str, object]) -> dict[str, str]:
    """Each flag in C++; what is None does not hold."""
    return {name: cxx_bool(holds) for name, holds in flags.items()}
