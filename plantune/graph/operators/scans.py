"""Recurrent layers over a sequence, as operators of torch: `plantune::gru_scan`, `lstm_scan`.

They take what the inputs add to the gates, of all steps at once, so that these are one product;
what is left of a step reads the state. Where `done` (T, N) holds, the state is zeros before that
step: a new episode begins. Their gradients are operators, too. Gates are in torch's order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

SCHEMAS = (
    "gru_scan(Tensor gates, Tensor state, Tensor weight, Tensor bias, Tensor? done) -> Tensor",
    "gru_scan_grad(Tensor dy, Tensor y, Tensor gates, Tensor state, Tensor weight, Tensor bias, "
    "Tensor? done) -> (Tensor, Tensor, Tensor, Tensor)",
    "lstm_scan(Tensor gates, Tensor state, Tensor cell, Tensor weight, Tensor bias, Tensor? done) "
    "-> (Tensor, Tensor)",
    "lstm_scan_grad(Tensor dy, Tensor dcells, Tensor y, Tensor cells, Tensor gates, Tensor state, "
    "Tensor cell, Tensor weight, Tensor bias, Tensor? done) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@dataclass(frozen=True)
class RecurrentLayers:
    """By what it is decided whether torch's layers are read as scans of `op`."""

    op: str
    dtype: str
    steps: int
    samples: int
    inputs: int
    hidden: int
    directions: int  # of all layers


def gru_scan(
    gates: Tensor, state: Tensor, weight: Tensor, bias: Tensor, done: Tensor | None
) -> Tensor:
    """The states (T, N, H) after each step, from gates (T, N, 3 H) and the state (N, H)."""
    made = []
    for step, of_x in enumerate(gates):
        state = _begun(state, done, step)
        _, update, fresh, _ = _gru_gates(of_x, linear(state, weight, bias))
        state = torch.lerp(fresh, state, update)
        made.append(state)
    return torch.stack(made)


def gru_scan_grad(
    dy: Tensor,
    y: Tensor,
    gates: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor,
    done: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of gates, state, weight and bias."""
    before = _before(y, state, done)
    of_state = linear(before, weight, bias)
    reset, update, fresh, new = _gru_gates(gates, of_state)
    # What a state's gradient becomes, of each step at once.
    of_fresh = (1 - update) * (1 - fresh * fresh)
    of_update = (before - fresh) * update * (1 - update)
    of_reset = of_fresh * new * reset * (1 - reset)
    factors = torch.cat((of_reset, of_update, of_fresh * reset), -1)
    carried, made = torch.zeros_like(state), []
    for step in reversed(range(len(dy))):
        made.append(dy[step] + carried)
        dgates = factors[step] * made[-1].repeat(1, 3)
        carried = _begun(torch.addmm(made[-1] * update[step], dgates, weight), done, step)
    dstates = torch.stack(made[::-1]).repeat(1, 1, 3)
    of_x = torch.cat((of_reset, of_update, of_fresh), -1) * dstates
    return of_x, carried, *_of_weights(factors * dstates, before)


def lstm_scan(
    gates: Tensor,
    state: Tensor,
    cell: Tensor,
    weight: Tensor,
    bias: Tensor,
    done: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The states and cells (T, N, H) after each step, from gates (T, N, 4 H) and both (N, H)."""
    states, cells = [], []
    for step, of_x in enumerate(gates):
        state, cell = _begun(state, done, step), _begun(cell, done, step)
        enters, stays, fresh, leaves = _lstm_gates(of_x + linear(state, weight, bias))
        cell = stays * cell + enters * fresh
        state = leaves * torch.tanh(cell)
        states.append(state)
        cells.append(cell)
    return torch.stack(states), torch.stack(cells)


def lstm_scan_grad(dy: Tensor, dcells: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """The gradients of gates, state, cell, weight and bias; what was `given` and made before."""
    y, cells, gates, state, cell, weight, bias, done = given
    before, cell_before = _before(y, state, done), _before(cells, cell, done)
    enters, stays, fresh, leaves = _lstm_gates(gates + linear(before, weight, bias))
    shown = torch.tanh(cells)
    of_cell = torch.cat(
        (
            fresh * enters * (1 - enters),
            cell_before * stays * (1 - stays),
            enters * (1 - fresh * fresh),
        ),
        -1,
    )
    of_leaves, through = shown * leaves * (1 - leaves), leaves * (1 - shown * shown)
    carried, carried_cell, made = torch.zeros_like(state), torch.zeros_like(cell), []
    for step in reversed(range(len(dy))):
        dstate = dy[step] + carried
        dcell = dcells[step] + carried_cell + dstate * through[step]
        dgates = torch.cat((of_cell[step] * dcell.repeat(1, 3), of_leaves[step] * dstate), -1)
        made.append(dgates)
        carried = _begun(dgates @ weight, done, step)
        carried_cell = _begun(dcell * stays[step], done, step)
    of_gates = torch.stack(made[::-1])
    return of_gates, carried, carried_cell, *_of_weights(of_gates, before)


def _begun(state: Tensor, done: Tensor | None, step: int) -> Tensor:
    """Zeros where a new episode begins with a step."""
    return state if done is None else torch.where(done[step, :, None], 0.0, state)


def _before(states: Tensor, first: Tensor, done: Tensor | None) -> Tensor:
    """The state that each step begins with."""
    made = torch.cat((first[None], states[:-1]))
    return made if done is None else torch.where(done[..., None], 0.0, made)


def _gru_gates(of_x: Tensor, of_state: Tensor) -> tuple[Tensor, ...]:
    """Reset, update and fresh, and what the state adds to the last."""
    reset_x, update_x, new_x = of_x.chunk(3, -1)
    reset_h, update_h, new = of_state.chunk(3, -1)
    reset, update = torch.sigmoid(reset_x + reset_h), torch.sigmoid(update_x + update_h)
    return reset, update, torch.tanh(new_x + reset * new), new


def _lstm_gates(sums: Tensor) -> tuple[Tensor, ...]:
    enters, stays, fresh, leaves = sums.chunk(4, -1)
    return torch.sigmoid(enters), torch.sigmoid(stays), torch.tanh(fresh), torch.sigmoid(leaves)


def _of_weights(of_gates: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias: one product over all steps."""
    rows = of_gates.flatten(0, 1)
    return rows.t() @ before.flatten(0, 1), rows.sum(0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, done = inputs
    made = output if isinstance(output, tuple) else (output,)
    ctx.has_done = done is not None
    ctx.save_for_backward(*made, *tensors, *(() if done is None else (done,)))


def _gru_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    kept = ctx.saved_tensors if ctx.has_done else (*ctx.saved_tensors, None)
    return (*torch.ops.plantune.gru_scan_grad(dy, *kept), None)


def _lstm_backward(ctx: Any, dy: Tensor, dcells: Tensor) -> tuple[Any, ...]:
    kept = ctx.saved_tensors if ctx.has_done else (*ctx.saved_tensors, None)
    return (*torch.ops.plantune.lstm_scan_grad(dy, dcells, *kept), None)


def _under_autocast(name: str, kind: str) -> Callable[..., Any]:
    """Like products, scans run in autocast's dtype."""
    without = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}"))

    def run(*inputs: Tensor | None) -> Any:
        dtype = torch.get_autocast_dtype(kind)
        with torch._C._ExcludeDispatchKeyGuard(without):
            cast = (x if x is None or not _is_cast(x) else x.to(dtype) for x in inputs)
            return getattr(torch.ops.plantune, name)(*cast)

    return run


def _is_cast(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64


_library = torch.library.Library("plantune", "FRAGMENT")
for _schema in SCHEMAS:
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    _library.impl(_name, globals()[_name], "CompositeExplicitAutograd")
for _name, _backward in (("gru_scan", _gru_backward), ("lstm_scan", _lstm_backward)):
    torch.library.register_autograd(
        f"plantune::{_name}", _backward, setup_context=_keep, lib=_library
    )
    for _kind in ("cpu", "cuda"):
        _library.impl(_name, _under_autocast(_name, _kind), f"Autocast{_kind.upper()}")
GRU_SCAN = torch.ops.plantune.gru_scan.default
LSTM_SCAN = torch.ops.plantune.lstm_scan.default
