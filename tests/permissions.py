"""Permissions that hold for root, too: tests of folders that cannot be written run as any user.

A thread of root that has given up two capabilities is judged by the bits of files and folders like
any other user, and takes the capabilities back afterwards. A user who is not root has none.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION_3 = 0x20080522  # _LINUX_CAPABILITY_VERSION_3 of linux/capability.h
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2
Words = ctypes.c_uint32 * 6  # effective, permitted, inheritable; then of the higher capabilities


def _call(name: str, words: ctypes.Array[ctypes.c_uint32]) -> None:
    head = (ctypes.c_uint32 * 2)(VERSION_3, 0)
    if getattr(ctypes.CDLL(None, use_errno=True), name)(head, words) != 0:
        raise OSError(ctypes.get_errno(), f"{name} failed")


@contextmanager
def obeyed() -> Iterator[None]:
    """In this thread."""
    if os.geteuid() != 0:
        yield
        return
    words = Words()
    _call("capget", words)
    before = words[0]
    words[0] = before & ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH)
    _call("capset", words)
    try:
        yield
    finally:
        words[0] = before
        _call("capset", words)


@contextmanager
def write_protected(folder: Path) -> Iterator[None]:
    """A folder in which this thread can make, change and remove no file, and its folders too."""
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    modes = {path: path.stat().st_mode for path in folders}
    files = {path: path.stat().st_mode for path in folder.rglob("*") if path.is_file()}
    for path, mode in (modes | files).items():
        path.chmod(mode & ~0o222)
    try:
        with obeyed():
            yield
    finally:
        for path, mode in (modes | files).items():
            path.chmod(mode)
