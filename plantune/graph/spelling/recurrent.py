"""How the recurrent operators of plantune's own are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from plantune.graph.spelling.reader import Reader, Value
from plantune.models.gru_translate import OPERATOR
from plantune.scans import GRU_SCAN, LSTM_SCAN


def _gru_translate(
    g: Reader,
    source: Value,
    lengths: Value | None,
    weights: Sequence[Value],
    noise: Value | None,
    *loop: int,
) -> tuple[Value, ...]:
    words = (source,) if lengths is None else (source, lengths)
    added = () if noise is None else (noise,)
    given = {"lengths": lengths is not None, "noise": noise is not None}
    numbers = dict(zip(("begin", "end", "max_steps"), loop, strict=True))
    return g.emit_all("gru_translate", *words, *weights, *added, **given, **numbers)


def _scan(name: str) -> Callable[..., Any]:
    def read(g: Reader, *inputs: Value | None) -> Value | tuple[Value, ...]:
        given = [value for value in inputs if value is not None]
        made = g.emit_all(name, *given, resets=inputs[-1] is not None)
        return made if len(made) > 1 else made[0]

    return read


OVERLOADS: dict[str, Callable[..., Any]] = {
    str(OPERATOR): _gru_translate,
    str(GRU_SCAN): _scan("gru_scan"),
    str(LSTM_SCAN): _scan("lstm_scan"),
}
