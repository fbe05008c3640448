"""Lines of the user's code, also of code that torch has written anew from it."""

from __future__ import annotations

import re
from pathlib import Path
from types import FrameType

import torch
from torch import fx

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = Path(__file__).parents[2]
# Also of code that no file has.
_NOT_THE_USERS = (_TORCH, str(_PACKAGE / "graph"), str(_PACKAGE / "backend"), "<")
# In what torch notes of a node, the innermost last.
_NOTED = re.compile(r'File "(.+?)", line (\d+)')


def line_in(frame: FrameType, number: int) -> str | None:
    """The user's line that this frame is at; None in code that is not theirs."""
    file = frame.f_code.co_filename
    if not file.startswith(_NOT_THE_USERS):
        return f"{file}:{number}"
    written = frame.f_locals.get("self")
    return _line_before(written, number) if isinstance(written, fx.GraphModule) else None


def lines_of(node: fx.Node) -> list[str]:
    """The user's lines that a node of a captured graph comes from, the innermost last."""
    noted = _NOTED.findall(node.stack_trace or "")
    return [f"{file}:{number}" for file, number in noted if not file.startswith(_TORCH)]


def _line_before(module: fx.GraphModule, number: int) -> str | None:
    """Of a line in the code of a graph module, the one that it was captured from."""
    places: dict[int, int] = getattr(module, "_lineno_map", None) or {}
    place = places.get(number - getattr(module, "_prologue_start", 0))
    if place is None:
        return None
    found = lines_of(list(module.graph.nodes)[place])
    return found[-1] if found else None


def files_of(error: BaseException) -> list[str]:
    """The files that an error came through."""
    files, step = [""], error.__traceback__
    while step is not None:
        files.append(step.tb_frame.f_code.co_filename)
        step = step.tb_next
    return files


def line_of(error: BaseException) -> str:
    """The innermost such line that an error came through."""
    lines, step = [""], error.__traceback__
    while step is not None:
        found = line_in(step.tb_frame, step.tb_lineno)
        lines += [] if found is None else [found]
        step = step.tb_next
    return lines[-1]
