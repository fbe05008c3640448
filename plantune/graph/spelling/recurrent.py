"""How recurrent layers are read: plantune's own operators, and torch's layers where the arch runs
them faster as scans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from plantune.graph.operators.gru_translate import OPERATOR
from plantune.graph.operators.scans import GRU_SCAN, LSTM_SCAN, RecurrentLayers
from plantune.graph.spelling.fills import filled
from plantune.graph.spelling.layers import linear
from plantune.graph.spelling.reader import NotRead, Reader, Value
from plantune.graph.spelling.shapes import reshape, transpose

A = torch.ops.aten


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


class _Settings(NamedTuple):
    """What torch is told of layers beside their inputs and states."""

    weights: Sequence[Value]
    has_biases: bool
    layers: int
    dropout: float
    train: bool
    both_ways: bool
    batch_first: bool

    def require_scans(self) -> None:
        """Raises NotRead where the layers compute something else."""
        if not self.has_biases or len(self.weights) != 4 * self.layers * (1 + self.both_ways):
            raise NotRead("layers without biases, or with projections")
        if self.train and self.dropout > 0 and self.layers > 1:
            raise NotRead("layers with dropout between them")


def _gru(g: Reader, x: Value, state: Value, *settings: Any) -> tuple[Value, ...]:
    return _layers(g, "gru_scan", x, [state], _Settings(*settings))


def _lstm(g: Reader, x: Value, states: Sequence[Value], *settings: Any) -> tuple[Value, ...]:
    return _layers(g, "lstm_scan", x, states, _Settings(*settings))


def _layers(
    g: Reader, op: str, x: Value, states: Sequence[Value], of: _Settings
) -> tuple[Value, ...]:
    """The states of all steps, then what each layer ends with, of each kind of state."""
    of.require_scans()
    types = [g.type_of(value) for value in (x, *states, *of.weights)]
    if len(types[0].shape) != 3 or len({type_.dtype for type_ in types}) > 1:
        raise NotRead("a sequence without samples, or of several dtypes")
    x = transpose(g, x) if of.batch_first else x
    steps, samples, inputs = g.shape(x)
    hidden, directions = types[1].shape[2], of.layers * (1 + of.both_ways)
    sizes = (steps, samples, inputs, hidden, directions)
    if not g.scans(RecurrentLayers(op, types[0].dtype, *sizes)):
        raise NotRead("a layer that the framework runs as fast")
    firsts = list(zip(*(_each(g, state) for state in states), strict=True))
    ends: list[list[Value]] = [[] for _ in states]
    for layer in range(of.layers):
        ways = []
        for back in range(1 + of.both_ways):
            at = layer * (1 + of.both_ways) + back
            weights = of.weights[4 * at : 4 * at + 4]
            made = _direction(g, op, x, firsts[at], weights, back=bool(back))
            ways.append(_flipped(g, made[0]) if back else made[0])
            for end, values in zip(ends, made, strict=True):
                end.append(g.torch_op(A.slice.Tensor, values, 0, steps - 1, steps))
        x = g.torch_op(A.cat.default, ways, 2) if of.both_ways else ways[0]
    last = (end[0] if len(end) == 1 else g.torch_op(A.cat.default, end) for end in ends)
    return (transpose(g, x) if of.batch_first else x, *last)


def _each(g: Reader, state: Value) -> list[Value]:
    """What each layer and direction begins with, in as few launches as there can be."""
    of_layers, samples, hidden = g.shape(state)
    if state in g.numbers:
        number, dtype = g.numbers[state], g.type_of(state).torch_dtype
        return [filled(g, (samples, hidden), number, dtype)] * of_layers
    if of_layers == 1:
        return [reshape(g, state, (samples, hidden))]
    return [g.torch_op(A.select.int, state, 0, at) for at in range(of_layers)]


def _direction(
    g: Reader, op: str, x: Value, first: Sequence[Value], weights: Sequence[Value], *, back: bool
) -> tuple[Value, ...]:
    of_x, of_state, bias, of_state_bias = weights
    gates = linear(g, _flipped(g, x) if back else x, of_x, bias)
    return g.emit_all(op, gates, *first, of_state, of_state_bias, resets=False)


def _flipped(g: Reader, x: Value) -> Value:
    return g.torch_op(A.flip.default, x, [0])


OVERLOADS: dict[str, Callable[..., Any]] = {
    str(OPERATOR): _gru_translate,
    str(GRU_SCAN): _scan("gru_scan"),
    str(LSTM_SCAN): _scan("lstm_scan"),
    "aten.gru.input": _gru,
    "aten.lstm.input": _lstm,
}
