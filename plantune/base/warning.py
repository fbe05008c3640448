"""The one way in which the package warns: each warning names the line of the user's code."""

from __future__ import annotations

import sys
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

from plantune.errors import PlantuneWarning

# Code that runs a call for the user, wherever it is installed.
BETWEEN = frozenset(("plantune", "torch"))
# Folders of installed packages; a virtual environment's may lie beside those of its base.
INSTALLED = ("site-packages", "dist-packages")
# Code without a file: Python's own import system, and modules that torch.fx writes.
GENERATED = ("<frozen ", "<eval_with_key>")


def warn(text: str, category: type[Warning] = PlantuneWarning) -> None:
    """As `warnings.warn`, of the line of the user's code that this came from, however many calls
    of plantune, torch, Python's library and installed packages are between.

    If there is no such line, as in a thread that runs a tuned module alone, it is the nearest one
    that is neither plantune's nor torch's.
    """
    frame = _frame_to_name()
    where = frame.f_globals
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        where.get("__name__") or "<unknown>",
        # Where Python keeps what it has said, as `warnings.warn` does.
        where.setdefault("__warningregistry__", {}),
    )


def _frame_to_name() -> FrameType:
    frames = [*_frames()]
    outside = [frame for frame in frames if not _is_between(frame)]
    users = (frame for frame in outside if not _is_of_a_library(frame.f_code.co_filename))
    return next(users, None) or next(iter(outside), frames[-1])


def _frames() -> Iterator[FrameType]:
    """Those of the callers, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_between(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in BETWEEN


@cache
def _is_of_a_library(name: str) -> bool:
    """Whether a file is Python's own or that of an installed package, scripts included."""
    if name.startswith(GENERATED):
        return True
    path = Path(name)
    return any(part in INSTALLED for part in path.parts) or any(
        path.is_relative_to(folder) for folder in _folders()
    )


@cache
def _folders() -> tuple[str, ...]:
    """Where Python's own modules are, as they are named and as links lead there."""
    named = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "scripts")]
    return tuple({*named, *(str(Path(folder).resolve()) for folder in named)})
