"""What searches for a problem took on this machine, as small files in the cache folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from plantune.errors import ForeignFile
from plantune.files import read_regular, write_whole
from plantune.paths import cache_folder

SIZE_LIMIT_BYTES = 64


def spent_s(key: str) -> float:
    """Seconds, in whatever process."""
    with suppress(OSError, ForeignFile, ValueError):
        return float(read_regular(_place(key), SIZE_LIMIT_BYTES))
    return 0.0


def remember(key: str, seconds: float) -> None:
    """If nothing can be written, the next process searches again."""
    with suppress(OSError):
        _place(key).parent.mkdir(parents=True, exist_ok=True)
        write_whole(_place(key), f"{seconds:.1f}".encode())


@contextmanager
def alone_with(key: str) -> Iterator[None]:
    """One process at a time, where files can be locked."""
    with ExitStack() as held:
        with suppress(OSError):
            _place(key).parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(_place(key).with_suffix(".lock").open("wb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _place(key: str) -> Path:
    return cache_folder() / "searched" / key
