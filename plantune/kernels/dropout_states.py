"""The memory in which cuDNN counts the random numbers of recurrent layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

RECURRENT = ("aten.lstm.", "aten.gru.", "aten.rnn_")


class DropoutStates(TorchDispatchMode):
    """Keeps those that are read inside.

    torch has one for each GPU, and makes another one after its generator was seeded or set; a graph
    that was captured before still counts in the old one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._cudnn_rnn.default and isinstance(args[-1], Tensor):
            self._kept.append(args[-1])
        if func is not torch.ops.aten._cudnn_rnn.default:
            with self:  # in inference mode a layer comes here as a whole
                made = func.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        return func(*args, **(kwargs or {}))


def keeping(op: str, call: Callable[[], None]) -> Callable[[], None]:
    """The call of an op, which keeps what a graph that it is captured in counts in."""
    if not op.startswith(RECURRENT):
        return call
    states = DropoutStates()

    def keep() -> None:
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return _without_advice(call)
        with states:
            return _without_advice(call)

    return keep


class _Inside(torch.autograd.Function):
    """A call that torch hands its warnings to, which otherwise come when the whole pass ends."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None]) -> None:
        call()


def _without_advice(call: Callable[[], None]) -> None:
    """Autocast's weights are apart in memory, which the user cannot change as torch advises."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part", UserWarning)
        _Inside.apply(call)  # type: ignore[no-untyped-call]
