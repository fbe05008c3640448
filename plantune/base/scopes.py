"""What holds inside of a block of code alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def with_values(place: Any, **values: object) -> Iterator[None]:
    """Inside, these attributes of `place` have these values: of one thread alone, if it is a
    `threading.local`.
    """
    before = {name: getattr(place, name) for name in values}
    try:
        for name, value in values.items():
            setattr(place, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(place, name, value)
