"""What environment variables ask for, read on request."""

from __future__ import annotations

import os


def extra_families() -> tuple[str, ...]:
    """Modules with kernel families of the user's own: PLANTUNE_FAMILIES=module:module."""
    return tuple(filter(None, os.environ.get("PLANTUNE_FAMILIES", "").split(":")))


def turns_file() -> str | None:
    """By which processes that time on one GPU take turns: PLANTUNE_TURNS; None if none is named."""
    return os.environ.get("PLANTUNE_TURNS") or None


def is_disabled() -> bool:
    """Whether PLANTUNE_DISABLE asks for the framework everywhere."""
    return _is_on("PLANTUNE_DISABLE")


def is_logging() -> bool:
    """Whether PLANTUNE_LOG asks for a line where calls begin to run in another way."""
    return _is_on("PLANTUNE_LOG")


def _is_on(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")
