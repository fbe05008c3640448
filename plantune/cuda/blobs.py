"""Bytes kept in files: what is read is what was written, or nothing."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

CHECKSUM_BYTES = 32


def read_blob(place: Path) -> bytes | None:
    """The bytes kept there, None where there are none or not those that were written."""
    try:
        stored = place.read_bytes()
    except OSError:
        return None
    checksum, content = stored[:CHECKSUM_BYTES], stored[CHECKSUM_BYTES:]
    return content if hashlib.sha256(content).digest() == checksum else None


def write_blob(place: Path, content: bytes) -> None:
    """Writes beside the target and moves it there, so that no one reads half of it.

    Raises OSError, and leaves nothing behind then.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=place.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(name, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
