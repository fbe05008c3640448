"""Reads the pickles that CIFAR comes in, without running anything that a file names."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

# A file of CIFAR is 155 MB at most; a pickle may ask for any amount of memory.
MOST_BYTES = 1 << 29


class Array:
    """In the place of numpy's arrays of bytes: their shape, and the bytes as they are stored."""

    def __init__(self, *given: Any) -> None:
        self.shape: tuple[int, ...] = ()
        self.data = b""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, data = state
        if not isinstance(kind, Kind) or kind.name not in ("u1", b"u1") or by_columns:
            raise pickle.UnpicklingError("an array whose elements are not bytes in rows")
        self.shape, self.data = tuple(shape), data


class Kind:
    """In the place of numpy's dtypes."""

    def __init__(self, name: Any = "", *given: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """The order of a byte's bytes is of no matter."""


def _encoded(text: str, coding: str) -> bytes:
    """Bytes as Python 3 writes them for Python 2."""
    if coding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"bytes in {coding!r}")
    return text.encode("latin1")


KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): Array,
    ("numpy._core.multiarray", "_reconstruct"): Array,
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): Kind,
    ("_codecs", "encode"): _encoded,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return KNOWN[module, name]


def read_pickle(path: Path) -> dict[str, Any]:
    """What a file holds, by names; its arrays are `Array`. Raises ValueError for any other file."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"{path} has {size} bytes, more than any file of CIFAR")
    try:
        with path.open("rb") as file:
            held = _Reader(file, encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of CIFAR: {error}") from error
    if not isinstance(held, dict):
        raise ValueError(f"{path} is not a file of CIFAR: it holds a {type(held).__name__}")
    return {_text(name): value for name, value in held.items()}


def _text(name: Any) -> str:
    return name.decode("latin1") if isinstance(name, bytes) else str(name)
