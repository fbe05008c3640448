"""How values are written in rendered sources."""

from __future__ import annotations

from collections.abc import Mapping


def cxx_bool(holds: object) -> str:
    return "true" if holds else "false"


def cxx_bools(flags: Mapping[str, object]) -> dict[str, str]:
    """Each flag in C++; what is None does not hold."""
    return {name: cxx_bool(holds) for name, holds in flags.items()}
