"""How the operator of plantune's own that translates is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from plantune.graph.spelling.reader import Reader, Value
from plantune.models.gru_translate import OPERATOR


def _gru_translate(
    g: Reader,
    source: Value,
    lengths: Value | None,
    weights: Sequence[Value],
    begin: int,
    end: int,
    max_steps: int,
) -> tuple[Value, ...]:
    words = (source,) if lengths is None else (source, lengths)
    loop = {"begin": begin, "end": end, "max_steps": max_steps}
    return g.emit_all("gru_translate", *words, *weights, lengths=lengths is not None, **loop)


OVERLOADS: dict[str, Callable[..., Any]] = {str(OPERATOR): _gru_translate}
