"""What compilers and broken workers write: kept in a file of the cache folder; messages name it."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path

from plantune.base.atomic_files import write_cached
from plantune.base.paths import writable_folder
from plantune.errors import BuildError

KEPT_LOGS = 100
ERROR_LENGTH = 160
# How NVRTC, ptxas, g++ and clang++ announce an error, wherever it is.
_ERROR = re.compile(r"\berror\b(?: *#[\w-]+)? *: *(.+)")


def build_error(what: str, log: str, request: str = "") -> BuildError:
    """The error of a compiler that refused; `request` is what it was given, for the log's file."""
    said = first_error(log)
    path = keep_log(f"{what}\n\n{log}\n\n{request}\n")
    return BuildError(f"{what}: {said}" if said else what, log, None if path is None else str(path))


def first_error(log: str) -> str:
    """The first error in a compiler's log, without its place; "" if none is announced."""
    found = _ERROR.search(log)
    return found[1].strip()[:ERROR_LENGTH] if found else ""


def keep_log(text: str) -> Path | None:
    """The file that holds a text from now on, None if it cannot be written."""
    folder = writable_folder() / "logs"
    place = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_cached(place, text.encode(errors="replace"))
        _drop_oldest(folder)
    except OSError:
        return None
    return place


def _drop_oldest(folder: Path) -> None:
    """Other processes may drop them too."""
    with suppress(FileNotFoundError):
        kept = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in kept[:-KEPT_LOGS]:
            path.unlink()
