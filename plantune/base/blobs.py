"""Bytes kept in the cache: what is read is what this user wrote under that name, or nothing.

Files in the cache are loaded as code, so a file counts only if no other user can have made it: a
regular file in a folder, both owned by this user and writable by no other, whose checksum covers
its name and its contents.
"""

from __future__ import annotations

import hashlib
import os
import stat
from functools import cache
from pathlib import Path

from plantune.base.atomic_files import write_cached
from plantune.base.warning import warn

CHECKSUM_BYTES = 32
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# A FIFO opens at once, and so can be refused; a symbolic link does not open.
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def read_blob(place: Path) -> bytes | None:
    """The bytes kept there, None if there are none or they are not what this user wrote there."""
    try:
        folder = os.open(place.parent, FOLDER_FLAGS)
    except OSError:
        return None
    try:
        stored = _own_bytes(place.name, folder)
    except OSError:
        return None
    finally:
        os.close(folder)
    content, checksum = stored[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:]
    return content if _checksum(place, content) == checksum else None


def write_blob(place: Path, content: bytes) -> None:
    """Raises OSError, and then leaves no file."""
    place.parent.mkdir(parents=True, exist_ok=True)
    _close_to_others(place.parent)
    write_cached(place, content + _checksum(place, content))


def why_not_trusted(folder: Path) -> str | None:
    """Why compiled kernels in a folder are not loaded, or None if they are."""
    try:
        status = folder.stat()
    except OSError:
        return None  # it will be made
    if status.st_uid != os.geteuid():
        return f"{folder} belongs to another user (uid {status.st_uid})"
    return None


def _own_bytes(name: str, folder: int) -> bytes:
    """The contents of a file in an opened folder; b"" if either is not this user's alone."""
    descriptor = os.open(name, FILE_FLAGS, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        whole = stat.S_ISREG(status.st_mode) and _is_own(status) and _is_own(os.fstat(folder))
        return file.read() if whole else b""


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE


def _checksum(place: Path, content: bytes) -> bytes:
    """Of the name too: a valid file under the name of another is refused."""
    return hashlib.sha256(place.name.encode() + b"\0" + content).digest()


def _close_to_others(folder: Path) -> None:
    """Makes a folder that only this user can write; raises OSError for another's."""
    reason = why_not_trusted(folder)
    if reason is not None:
        _warn_once(reason)
        raise PermissionError(reason)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & OTHERS_WRITE:
        folder.chmod(mode & ~OTHERS_WRITE)


@cache
def _warn_once(reason: str) -> None:
    how = "set PLANTUNE_CACHE_DIR to a folder of your own"
    warn(
        f"compiled kernels are not kept, each process compiles them again: {reason}; {how}",
    )
