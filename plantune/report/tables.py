"""Plain text: tables as wide as the terminal, and numbers with as many digits as mean something."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plantune.kernels.family import Candidate

GAP = "  "
# Text in narrower columns is harder to read than lines that the terminal breaks.
NARROW = 10


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], align: str, width: int | None = None
) -> str:
    """Columns two spaces apart; `align` has an l or r for each of them.

    With a `width`, columns of text (l) are wrapped until the lines fit, the widest ones first.
    Numbers (r) stay whole, and only their titles are wrapped.
    """
    lines = [list(headers), *map(list, rows)]
    widths = _fitted(list(zip(*lines, strict=True)), align, width)
    return "\n".join(text for line in lines for text in _wrapped(line, widths, align))


def _fitted(columns: Sequence[Sequence[str]], align: str, width: int | None) -> list[int]:
    """The widths: first columns are wrapped between words, then words are broken too."""
    widths = [max(map(len, column)) for column in columns]
    if width is None:
        return widths
    room = width - len(GAP) * (len(widths) - 1)
    sides = list(zip(columns, align, strict=True))
    _narrow(widths, [_least_whole(column, side) for column, side in sides], room)
    _narrow(widths, [_least(column, side) for column, side in sides], room)
    return widths


def _narrow(widths: list[int], least: Sequence[int], room: int) -> None:
    """Cuts the widest columns first, as far as each may be."""
    while sum(widths) > room:
        wide = [at for at, width in enumerate(widths) if width > least[at]]
        if not wide:
            break
        widths[max(wide, key=lambda at: widths[at])] -= 1


def _least_whole(column: Sequence[str], side: str) -> int:
    """How narrow a column may get without breaking a word, or the cell of a number."""
    title, *cells = column
    parts = [*title.split(), *(cells if side == "r" else " ".join(cells).split())]
    return max(map(len, parts), default=0)


def _least(column: Sequence[str], side: str) -> int:
    whole = _least_whole(column, side)
    return whole if side == "r" else min(NARROW, whole)


def _wrapped(cells: Sequence[str], widths: Sequence[int], align: str) -> list[str]:
    """A row as lines; each cell takes as many as it needs."""
    parts = [
        textwrap.wrap(cell, width, break_on_hyphens=False) if len(cell) > width else [cell]
        for cell, width in zip(cells, widths, strict=True)
    ]
    return [
        GAP.join(
            part.rjust(width) if side == "r" else part.ljust(width)
            for part, width, side in zip(line, widths, align, strict=True)
        ).rstrip()
        for line in zip_longest(*parts, fillvalue="")
    ]


def us_text(us: float | None) -> str:
    """Microseconds as what reads best; "-" for what is not known."""
    if us is None:
        return "-"
    if us < 0:
        return f"-{us_text(-us)}"
    if us < 1000:
        return f"{us:.3g} us" if us < 100 else f"{us:.0f} us"
    return ms_text(us / 1e3)


def ms_text(ms: float) -> str:
    return f"{ms / 1e3:.3g} s" if ms >= 10_000 else f"{ms:.4g} ms"


def bytes_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def config_text(candidate: Candidate) -> str:
    """Its family and what its config says."""
    words = [f"{key}={_word(value)}" for key, value in candidate.config.items()]
    return " ".join([candidate.family, *words])


def and_more(names: Sequence[str]) -> str:
    """The first, and how many follow it."""
    return names[0] + (f" +{len(names) - 1}" if names[1:] else "")


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def machine_text(environment: Mapping[str, Any]) -> str:
    """The processor of an environment, and how many threads if that matters."""
    threads = environment["threads"]
    return f"{environment['device']}" + (f", {counted(threads, 'thread')}" if threads else "")


def counted(count: int, thing: str, many: str | None = None) -> str:
    return f"{count} {thing if count == 1 else many or thing + 's'}"
