"""Before a caller's passes are captured they run as they will be: launch by launch.

cuDNN and cuBLAS choose and prepare in the first call of each thread, which no capture can hold, and
torch runs backward passes in threads of its own, in which a replay prepares nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class _Rehearsals:
    """Of all threads: a backward pass is not in that of its forward pass."""

    under_way = 0


@contextmanager
def rehearsing() -> Iterator[None]:
    """Inside, no pass is replayed."""
    _Rehearsals.under_way += 1
    try:
        yield
    finally:
        _Rehearsals.under_way -= 1


def is_rehearsing() -> bool:
    return _Rehearsals.under_way > 0
