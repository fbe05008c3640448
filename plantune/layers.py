"""Layers that torch has no module for."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from plantune.graph.operators.scans import GRU_SCAN, LSTM_SCAN


class SpaceToDepth(nn.Module):
    """Moves `block` x `block` pixels into channels: channel = (dy * block + dx) * C + c."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        b = self.block
        x = x.view(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
        return x.reshape(n, c * b * b, h // b, w // b)

    def extra_repr(self) -> str:
        return f"block={self.block}"


class _Episodic(nn.RNNBase):
    """One of torch's recurrent layers, with its parameters."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__(input_size, hidden_size, num_layers)  # type: ignore[arg-type] # of nn.GRU

    @classmethod
    def of(cls, layer: nn.RNNBase) -> Self:
        """In the place of a layer, with its parameters."""
        others = (layer.bidirectional, layer.batch_first, layer.dropout > 0, layer.proj_size > 0)
        if any(others) or not layer.bias:
            raise ValueError(
                f"a sequence of episodes is (T, N, inputs), in one direction, with biases and "
                f"without dropout and projections: got {layer}"
            )
        made = cls(layer.input_size, layer.hidden_size, layer.num_layers)
        for name, parameter in layer.named_parameters():
            setattr(made, name, parameter)
        return made.train(layer.training)


class EpisodicGRU(_Episodic, nn.GRU):
    """A GRU over sequences (T, N, inputs) in which episodes end: where `done` (T, N) holds, the
    state is zeros before that step. Its parameters are those of nn.GRU.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, state: Tensor | None = None, done: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The last layer's states (T, N, H), and each layer's last one (layers, N, H)."""
        last = []
        state = _zeros(self, x) if state is None else state
        for layer, (w_ih, w_hh, b_ih, b_hh) in enumerate(self.all_weights):
            x = GRU_SCAN(linear(x, w_ih, b_ih), state[layer], w_hh, b_hh, done)
            last.append(x[-1])
        return x, torch.stack(last)


class EpisodicLSTM(_Episodic, nn.LSTM):
    """As EpisodicGRU; the state is a pair, as that of nn.LSTM."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        state: tuple[Tensor, Tensor] | None = None,
        done: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The last layer's states (T, N, H), and each layer's last state and cell."""
        last, last_cells = [], []
        state = (_zeros(self, x), _zeros(self, x)) if state is None else state
        for layer, (w_ih, w_hh, b_ih, b_hh) in enumerate(self.all_weights):
            first = state[0][layer], state[1][layer]
            x, cells = LSTM_SCAN(linear(x, w_ih, b_ih), *first, w_hh, b_hh, done)
            last.append(x[-1])
            last_cells.append(cells[-1])
        return x, (torch.stack(last), torch.stack(last_cells))


def _zeros(layer: nn.RNNBase, x: Tensor) -> Tensor:
    return x.new_zeros(layer.num_layers, x.shape[1], layer.hidden_size)
