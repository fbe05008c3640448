"""Layers that torch has no module for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from plantune.scans import GRU_SCAN, LSTM_SCAN


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


class EpisodicGRU(nn.GRU):
    """A GRU over sequences (T, N, inputs) in which episodes end: where `done` (T, N) holds, the
    state is zeros before that step. Its parameters are those of nn.GRU.
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__(input_size, hidden_size, num_layers)

    def forward(  # type: ignore[override]
        self, x: Tensor, state: Tensor, done: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The last layer's states (T, N, H), and each layer's last one (layers, N, H)."""
        last = []
        for layer, (w_ih, w_hh, b_ih, b_hh) in enumerate(self.all_weights):
            x = GRU_SCAN(linear(x, w_ih, b_ih), state[layer], w_hh, b_hh, done)
            last.append(x[-1])
        return x, torch.stack(last)


class EpisodicLSTM(nn.LSTM):
    """As EpisodicGRU; the state is a pair, as that of nn.LSTM."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__(input_size, hidden_size, num_layers)

    def forward(  # type: ignore[override]
        self, x: Tensor, state: tuple[Tensor, Tensor], done: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The last layer's states (T, N, H), and each layer's last state and cell."""
        last, last_cells = [], []
        for layer, (w_ih, w_hh, b_ih, b_hh) in enumerate(self.all_weights):
            first = state[0][layer], state[1][layer]
            x, cells = LSTM_SCAN(linear(x, w_ih, b_ih), *first, w_hh, b_hh, done)
            last.append(x[-1])
            last_cells.append(cells[-1])
        return x, (torch.stack(last), torch.stack(last_cells))
