"""The gradients of a captured pass, as callers get them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plantune.graph.graph import Graph
from plantune.kernels.copies import Copies
from plantune.kernels.family import Values
from plantune.runtime.flat import FlatLayout
from plantune.space.arch import Arch


class Gradients:
    """Gathers the gradients of parameters in one buffer, with the parameters' own strides.

    A replay writes into that buffer; a caller gets a copy of the whole, so no later replay writes
    into memory that anybody still sees. Autograd takes over what has the parameter's strides; of
    anything else it would make another copy.
    """

    def __init__(self, graph: Graph, arch: Arch, device: torch.device) -> None:
        inputs = {name for name, _ in graph.inputs}
        self._device = device
        self._copies = Copies(arch, device)
        self._of_inputs = [pair for pair in graph.gradients if pair[0] in inputs]
        self._of_weights = [pair for pair in graph.gradients if pair[0] not in inputs]
        self._layout = FlatLayout({}, {})
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._views: dict[str, Tensor] = {}

    def follow(self, state: Mapping[str, Tensor]) -> None:
        """Makes room for gradients of parameters that are stored like these."""
        self._layout = FlatLayout.of({name: state[name] for name, _ in self._of_weights})
        self._buffers = self._layout.buffers(self._device)
        self._views = self._layout.views(self._buffers)

    def gather(self, stream: int, values: Values) -> None:
        """Enqueues the end of a backward pass."""
        pairs = [(self._views[name], values[value]) for name, value in self._of_weights]
        self._copies.launch(stream, pairs)

    def handed_over(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All gradients by the names of their inputs or parameters, in memory of the caller's."""
        kept = {dtype: buffer.clone() for dtype, buffer in self._buffers.items()}
        found = self._layout.views(kept)
        for name, value in self._of_inputs:
            found[name] = values[value].clone(memory_format=torch.contiguous_format)
        return found
