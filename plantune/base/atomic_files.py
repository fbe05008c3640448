"""Writes files whole: under a name of its own first, then moved to where it is wanted.

So no one reads half of a file, and a process that is killed amid it leaves the old one as it was.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

# As any program makes a file that its user names: the umask takes away from it. What is loaded as
# code is the user's alone.
SHARED, PRIVATE = 0o666, 0o600
NAME_BYTES = 200  # of 255 that file systems allow
DAY_S = 24 * 3600.0
# What killed writers leave; earlier releases put their process into the name.
LEFT = re.compile(r".*\.[0-9a-f]{16}\.unfinished|[0-9a-f]{64}\.[0-9]+\.unfinished", re.DOTALL)


def write_lasting(path: Path, content: bytes) -> None:
    """For what a user keeps: it outlasts a loss of power, with the permissions that the umask
    leaves.

    Raises OSError that names `path`, and leaves what was there before.
    """
    _write(path, content, SHARED, lasts=True)


def write_cached(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """For what can be made again, in a folder of the cache: first removes what writers that were
    killed left in this folder.

    Raises OSError, and leaves what was there before.
    """
    _tidy(path.parent)
    _write(path, content, mode, lasts=False)


def require_writable(path: Path) -> None:
    """Raises OSError if a file could not be made there now; leaves everything as it is."""
    with suppress(FileNotFoundError):
        os.lstat(path)  # says whether the name itself is too long
    _write(path, None, SHARED, lasts=False)


def _write(path: Path, content: bytes | None, mode: int, *, lasts: bool) -> None:
    unfinished = _unfinished(path)
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with open(descriptor, "wb") as file:
                file.write(content or b"")
                file.flush()
                if lasts:
                    os.fsync(descriptor)
            if content is not None:
                os.replace(unfinished, path)
        finally:
            with suppress(OSError):  # where it was moved, nothing has this name
                os.unlink(unfinished)
    except OSError as error:  # It names a file that its user does not know.
        raise OSError(error.errno, error.strerror, str(path)) from error
    if lasts:
        _sync_folder(path.parent)


def _unfinished(path: Path) -> Path:
    """A name beside `path` that no other writer has, in this process or another one."""
    name = os.fsencode(path.name)[:NAME_BYTES].decode(errors="ignore")
    return path.with_name(f"{name}.{os.urandom(8).hex()}.unfinished")


def _sync_folder(folder: Path) -> None:
    """Keeps a file's new name; some file systems cannot, and then it is as good as it gets."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@cache
def _tidy(folder: Path) -> None:
    """Once for a folder in a process. A writer takes no day: what is as old has none left."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if LEFT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                age_s = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if age_s > DAY_S:
                    os.unlink(entry.path)
