"""Graphs that read and write a caller's memory where it lies, where the caller brings it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Calls with the same addresses until there is a graph for them. The copy of the input took 4.6 us
# of the GPU; that of the output 3 to 6, and 9 of the host (batch 128, H200, 2026-11-20).
DIRECT_AFTER = 16
# Two inputs and two outputs in turns make four, and one for each input alone; some were in vain.
MOST_DIRECT = 8
# Enough for some inputs in turns whose outputs never lie where others lay.
MOST_COUNTED = 256

Results = Mapping[str, Tensor]
# Of the inputs, and behind them of the outputs, unless a graph writes to memory of its own.
Addresses = tuple[int, ...]


@dataclass(frozen=True)
class Pass:
    """A captured pass, and the values that each replay writes anew in memory of its own."""

    graph: torch.cuda.CUDAGraph
    results: Results


class DirectPasses:
    """The passes for some addresses, and how often others came."""

    def __init__(self) -> None:
        self.made: dict[Addresses, Pass] = {}
        self._calls: dict[Addresses, int] = {}
        self._most = MOST_DIRECT

    def is_due(self, addresses: Addresses) -> bool:
        """Whether a call with these addresses, for which there is no graph, should make one."""
        if len(self.made) >= self._most:
            return False
        if len(self._calls) >= MOST_COUNTED:
            self._calls.clear()
        self._calls[addresses] = self._calls.get(addresses, 0) + 1
        return self._calls[addresses] > DIRECT_AFTER

    def stop(self) -> None:
        """No more graphs: the last one could not be made."""
        self._most = len(self.made)

    def clear(self) -> None:
        self.made.clear()
        self._calls.clear()
