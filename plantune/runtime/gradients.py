"""The gradients of a captured pass, as callers get them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from plantune.cuda.recording import recorded
from plantune.kernels.copies import Copies
from plantune.kernels.family import Values
from plantune.runtime.flat import FlatLayout
from plantune.runtime.program import Program
from plantune.space.arch import Arch


class Gradients:
    """Gathers the gradients of parameters in one buffer, with the parameters' own strides.

    A replay writes into that buffer, by the kernels that make a gradient if these can, else by one
    more launch. A caller gets a copy of the whole, so no later replay writes into memory that
    anybody still sees. Autograd takes over what has the parameter's strides; of anything else it
    would make another copy.
    """

    def __init__(self, program: Program, arch: Arch, device: torch.device) -> None:
        graph = program.graph
        self._program = program
        inputs = {name for name, _ in graph.inputs}
        self._device = device
        self._copies = Copies(arch, device)
        self._of_inputs = [pair for pair in graph.gradients if pair[0] in inputs]
        self._of_weights = [pair for pair in graph.gradients if pair[0] not in inputs]
        self._targets = Counter(value for _, value in graph.gradients)
        self._layout = FlatLayout({}, {})
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._views: dict[str, Tensor] = {}
        self._gathered: list[tuple[str, str]] = []

    def follow(self, state: Mapping[str, Tensor]) -> None:
        """Makes room for gradients of parameters that are stored like these."""
        self._layout = FlatLayout.of({name: state[name] for name, _ in self._of_weights})
        self._buffers = self._layout.buffers(self._device)
        self._views = self._layout.views(self._buffers)
        self._gathered = [pair for pair in self._of_weights if not self._is_made_there(*pair)]

    def _is_made_there(self, name: str, value: str) -> bool:
        """Has the step that makes a gradient write it into the buffer, and says whether it does."""
        values, place = self._program.values, self._views[name]
        steps = self._program.touching(value, "backward")
        alone = len(steps) == 1 and self._targets[value] == 1
        if not alone or value not in values or not _are_alike(values[value], place):
            return False
        before, own = self._arguments(*steps), values[value]
        values[value] = place
        if self._arguments(*steps) != before:
            return True
        values[value] = own  # the kernel was told of its place at another time
        return False

    def _arguments(self, step: str) -> list[tuple[bytes, ...]]:
        with recorded(only=True) as recording:
            self._program.run_step(step)
        return [launched.arguments for launched in recording.launches]

    def gather(self, stream: int, values: Values) -> None:
        """Enqueues the end of a backward pass."""
        pairs = [(self._views[name], values[value]) for name, value in self._gathered]
        self._copies.launch(stream, pairs)

    def handed_over(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All gradients by the names of their inputs or parameters, in memory of the caller's."""
        kept = {dtype: buffer.clone() for dtype, buffer in self._buffers.items()}
        found = self._layout.views(kept)
        for name, value in self._of_inputs:
            found[name] = values[value].clone(memory_format=torch.contiguous_format)
        return found


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether the elements of both are stored in one order."""
    wide = [axis for axis, size in enumerate(one.shape) if size > 1]
    strides = [(one.stride(axis), other.stride(axis)) for axis in wide]
    return one.dtype == other.dtype and all(first == second for first, second in strides)
