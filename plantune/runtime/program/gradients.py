"""The gradients of a captured pass, as callers get them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from plantune.devices.cuda.recording import recorded
from plantune.kernels.family import Values
from plantune.kernels.weights.copies import Copies
from plantune.runtime.program.arrivals import Report
from plantune.runtime.program.exchange import Exchange
from plantune.runtime.program.flat import FlatLayout, are_alike
from plantune.runtime.program.program import Program
from plantune.space.arch import Arch


class Gradients:
    """Gathers the gradients of parameters in one buffer, with the parameters' own strides.

    A replay writes into that buffer, by the kernels that make a gradient if these can, else by one
    more launch. A caller gets a copy of the whole, so no later replay writes into memory that
    anybody still sees; in a capture of the caller's each backward pass has a buffer of its own
    instead. Autograd takes over what has the parameter's strides; of anything else it would make
    another copy.
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
        self._state: Mapping[str, Tensor] = {}
        # Where an exchange has the gradients of these parameters, and who hears of them.
        self._exchanged: dict[str, Tensor] = {}
        self.report: Report | None = None

    def follow(self, state: Mapping[str, Tensor]) -> None:
        """Makes room for gradients of parameters that are stored like these."""
        self._state = state
        self._layout = FlatLayout.of({name: state[name] for name, _ in self._of_weights})
        self._buffers = self._layout.buffers(self._device)
        self._views = self._layout.views(self._buffers)
        self._gathered = [pair for pair in self._of_weights if not self._is_made_there(*pair)]

    def _is_made_there(self, name: str, value: str) -> bool:
        """Has the step that makes a gradient write it into the buffer, and says whether it does."""
        values, place = self._program.values, self._views[name]
        steps = self._program.touching(value, "backward")
        alone = len(steps) == 1 and self._targets[value] == 1
        if not alone or value not in values or not are_alike(values[value], place):
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
        left = [pair for pair in self._gathered if pair[0] not in self._exchanged]
        self._copies.launch(stream, [(self._views[name], values[value]) for name, value in left])

    @contextmanager
    def in_new_memory(self, exchange: Exchange | None = None) -> Iterator[dict[str, Tensor]]:
        """Inside, a backward pass writes gradients of parameters into memory that nobody has seen,
        or where an exchange has them; it is given here by the names of the parameters.
        """
        values, own = self._program.values, self._views
        taken = {} if exchange is None else self._places_in(exchange)
        if len(taken) < len(self._layout.slots):
            buffers = {dtype: torch.empty_like(buffer) for dtype, buffer in self._buffers.items()}
            new = {**self._layout.views(buffers), **taken}
        else:
            new = taken
        made = [pair for pair in self._of_weights if pair not in self._gathered]
        before = {value: values[value] for _, value in made}
        self._views, self._exchanged = new, taken
        if exchange is not None:
            self.report = partial(self._arrived, exchange)
        values.update({value: new[name] for name, value in made})
        try:
            yield dict(new)
        finally:
            self._views, self._exchanged, self.report = own, {}, None
            values.update(before)

    def _places_in(self, exchange: Exchange) -> dict[str, Tensor]:
        places = {name: exchange.place_for(self._state[name]) for name in self._layout.slots}
        return {name: place for name, place in places.items() if place is not None}

    def _arrived(self, exchange: Exchange, made: Sequence[str]) -> None:
        found = [pair for pair in self._of_weights if pair[0] in self._exchanged]
        exchange.arrived(
            [
                (self._exchanged[name], self._program.values[value] if is_copied else None)
                for name, value in found
                if value in made
                for is_copied in ((name, value) in self._gathered,)
            ]
        )

    def handed_over(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All gradients by the names of their inputs or parameters, in memory of the caller's."""
        kept = {dtype: buffer.clone() for dtype, buffer in self._buffers.items()}
        return {**self._layout.parts(kept), **self.of_inputs(values)}

    def of_inputs(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of inputs alone, in memory of the caller's."""
        return {
            name: values[value].clone(memory_format=torch.contiguous_format)
            for name, value in self._of_inputs
        }
