"""Recurrent layers over a sequence, with episodes that end inside of it (see
plantune/graph/operators/scans.py).

Inputs are what the inputs add to the gates (T, N, gates x H), the state (N, H), for an LSTM the
cell, the recurrent weight and bias, and with `resets` where episodes begin (T, N).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.graph.operators.scans import gru_scan, gru_scan_grad, lstm_scan, lstm_scan_grad
from plantune.graph.ops.base import Gradient, Gradients, Op, Tensors, Types
from plantune.graph.types import TensorType


class Scan(Op):
    """Outputs are the states (T, N, H) after each step, and of an LSTM the cells."""

    arity = None
    multiplies = True

    def __init__(self, name: str, gates: int, states: int, run: Callable[..., object]) -> None:
        self.name, self.gates, self.states = name, gates, states
        self.run = run

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        count = self.states + 3 + attrs["resets"]
        self.require(len(inputs) == count, f"takes {count} inputs, got {len(inputs)}")
        gates, *others = inputs
        fits = len(gates.shape) == 3 and min(gates.shape) > 0 and not gates.shape[2] % self.gates
        self.require(fits and gates.is_float, f"needs gates (T, N, {self.gates} H), got {gates}")
        steps, samples, width = gates.shape
        hidden = width // self.gates
        shapes = [(samples, hidden)] * self.states + [(width, hidden), (width,)]
        wanted = [TensorType(shape, gates.dtype) for shape in shapes]
        wanted += [TensorType((steps, samples), "bool")] * attrs["resets"]
        self.require(others == wanted, f"needs {', '.join(map(str, wanted))}")
        return (TensorType((steps, samples, hidden), gates.dtype),) * self.states

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return _tuple(self.run(*inputs, *_none(attrs)))

    def gradient(self, grad: Gradient) -> Gradients:
        made = zip(grad.outputs, grad.output_gradients, strict=True)
        seeds = [
            grad.emit("affine", y, alpha=0.0, beta=0.0) if dy is None else dy for y, dy in made
        ]
        found = grad.emit_all(
            f"{self.name}_grad", *seeds, *grad.outputs, *grad.inputs, **grad.attrs
        )
        return (*found, None) if grad.attrs["resets"] else found

    def flops(self, inputs: Types, outputs: Types, attrs: Attrs) -> int:
        steps, samples, width = inputs[0].shape
        return 2 * steps * samples * inputs[self.states + 1].numel + 4 * steps * samples * width


class ScanGrad(Op):
    """Inputs are the gradients of the outputs, the outputs and the inputs; outputs the gradients of
    the inputs, but of the resets.
    """

    arity = None
    multiplies = True

    def __init__(self, forward: Scan, run: Callable[..., object]) -> None:
        self.forward, self.run = forward, run
        self.name = f"{forward.name}_grad"

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        made, given = inputs[: 2 * self.forward.states], inputs[2 * self.forward.states :]
        wanted = [*self.forward.infer(given, attrs)] * 2
        self.require(list(made) == wanted, f"gradients and outputs need {wanted[0]}")
        return tuple(given[: self.forward.states + 3])

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return _tuple(self.run(*inputs, *_none(attrs)))

    def flops(self, inputs: Types, outputs: Types, attrs: Attrs) -> int:
        given = inputs[2 * self.forward.states :]
        return 3 * self.forward.flops(given, inputs[: self.forward.states], attrs)


def _none(attrs: Attrs) -> tuple[None, ...]:
    return () if attrs["resets"] else (None,)


def _tuple(made: object) -> Tensors:
    return (made,) if isinstance(made, Tensor) else tuple(made)  # type: ignore[arg-type]


GRU, LSTM = Scan("gru_scan", 3, 1, gru_scan), Scan("lstm_scan", 4, 2, lstm_scan)
OPS: tuple[Op, ...] = (GRU, LSTM, ScanGrad(GRU, gru_scan_grad), ScanGrad(LSTM, lstm_scan_grad))
