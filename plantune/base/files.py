"""Files that options name. What is not plantune's own is read at most, never moved or overwritten.

The plan database's part of this rule is in `plans/database/recognition.py`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from plantune.base import atomic_files
from plantune.base.atomic_files import write_lasting
from plantune.errors import ForeignFile

# What is there already is read whole; plantune's largest files are exports.
OUTPUT_LIMIT_BYTES = 256 << 20
# The names of stdout; where it is once its descriptor was given to others.
STDOUT = frozenset(map(Path, ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")))
_stdout: list[Path] = []


def read_regular(path: Path, limit_bytes: int, *, follow: bool = True) -> bytes:
    """The content of a regular file. A pipe is not waited for.

    Raises ForeignFile if it cannot be opened, is something else or too large.
    """
    links = 0 if follow else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links)
    except OSError as error:
        is_link = bool(links) and path.is_symlink()
        raise ForeignFile(
            "is a symbolic link" if is_link else f"cannot be read: {error.strerror}"
        ) from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ForeignFile(f"is {kind_of(mode)}, not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(limit_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > limit_bytes:
        raise ForeignFile(f"is larger than {limit_bytes} bytes")
    return content


def kind_of(mode: int) -> str:
    """What a file of this mode is, in words."""
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFLNK: "a symbolic link",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def require_replaceable(path: Path, what: str, is_own: Callable[[bytes], bool]) -> None:
    """Raises ForeignFile if `path` holds anything but an earlier `what` of plantune.

    Nothing is lost by writing to an empty file or a terminal, so these are accepted.
    """
    if not os.path.lexists(path) or _is_terminal(path):
        return
    try:
        content = read_regular(path, OUTPUT_LIMIT_BYTES, follow=False)
    except ForeignFile as error:
        raise ForeignFile(f"{path}: {error}; give another path") from error
    if content and not is_own(content):
        raise ForeignFile(
            f"{path}: is not {what} of plantune and was not overwritten; give another path, "
            "or remove it first"
        )


def moved_stdout(descriptor: int) -> None:
    """From now on the names of stdout mean this descriptor."""
    _stdout[:] = [Path(f"/proc/self/fd/{descriptor}")]


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that an option names, whole or not at all; into a terminal as it comes.

    Raises OSError, and leaves what was there before.
    """
    if _is_terminal(path):
        with open(_meant(path), "wb", buffering=0) as device:
            device.write(content)
        return
    write_lasting(path, content)


def require_writable(path: Path) -> None:
    """Raises OSError if `write_whole` could not write there now; leaves everything as it is."""
    if not _is_terminal(path):
        atomic_files.require_writable(path)


def _is_terminal(path: Path) -> bool:
    """Whether it is a character device, such as /dev/null or a terminal."""
    with suppress(OSError):
        return stat.S_ISCHR(os.stat(_meant(path)).st_mode)
    return False


def _meant(path: Path) -> Path:
    return _stdout[0] if _stdout and path in STDOUT else path
