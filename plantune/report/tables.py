"""Plain text: aligned tables, and numbers with as many digits as mean something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Columns two spaces apart; `align` has an l or r for each of them."""
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    texts = []
    for line in lines:
        cells = [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(line, widths, align, strict=True)
        ]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def us_text(us: float | None) -> str:
    """Microseconds as what reads best; "-" for what is not known."""
    if us is None:
        return "-"
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


def config_text(family: str, config: Mapping[str, Any]) -> str:
    """A candidate: its family and what its config says."""
    words = [f"{key}={_word(value)}" for key, value in config.items()]
    return " ".join([family, *words])


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def machine_text(environment: Mapping[str, Any]) -> str:
    """The processor of an environment, and how many threads where that matters."""
    threads = environment["threads"]
    return (
        f"{environment['device']}, {counted(threads, 'thread')}"
        if threads
        else (str(environment["device"]))
    )


def counted(count: int, thing: str, many: str | None = None) -> str:
    return f"{count} {thing if count == 1 else many or thing + 's'}"
