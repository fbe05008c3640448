"""The strides in which a caller gets results: those that eager gives them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from plantune.devices.device import first_line
from plantune.graph.layouts import same_places
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.eager_strides import Strides, strides_in_eager
from plantune.runtime.watched.live_state import OwnedTensors
from plantune.runtime.watched.torch_internals import hooks_are_allowed, is_capturing

log = logging.getLogger(__name__)
# Kinds of strides of inputs of which eager is asked. Slices of others may have ever new ones.
MOST_ASKED = 16
Key = tuple[tuple[int, ...], ...]


class ResultStrides:
    """What eager gives the results of one kind of call, by the strides of its inputs. The module is
    asked for each once, with the inputs of the first such call, and again after a weight got other
    strides: not if results are always in `rows`.
    """

    def __init__(
        self,
        owned: OwnedTensors,
        call: Arguments,
        device: torch.device,
        rows: tuple[Strides, ...] = (),
        *,
        trains: bool = False,
    ) -> None:
        self.rows = rows
        self._owned, self._call, self._device, self._trains = owned, call, device, trains
        self._moves = -1
        self._of_weights: Key = ()
        self._known: dict[Key, tuple[Strides, ...]] = {}

    @property
    def are_due(self) -> bool:
        """Whether a weight was moved since the last question: what was answered may be over."""
        return self._moves != self._owned.moves

    def of(self, inputs: Sequence[Tensor]) -> tuple[Strides, ...] | None:
        """The strides of each result; None if they are not known, as in a capture."""
        if self.rows:
            return self.rows
        if self.are_due:
            self._look()
        key = tuple([x.stride() for x in inputs])
        found = self._known.get(key)
        if found is None:
            found = self._asked(key, inputs)
        return found or None

    def _look(self) -> None:
        """Forgets what follows from other strides of weights."""
        moves, now = self._owned.moves, tuple([t.stride() for t in self._owned.present])
        if now != self._of_weights:
            self._known, self._of_weights = {}, now
        self._moves = moves

    def _asked(self, key: Key, inputs: Sequence[Tensor]) -> tuple[Strides, ...]:
        captures = self._device.type == "cuda" and is_capturing()
        if len(self._known) >= MOST_ASKED or captures or not hooks_are_allowed():
            return ()
        found: tuple[Strides, ...] = ()
        try:
            with torch.set_grad_enabled(self._trains):
                found = strides_in_eager(self._owned.module, self._call, inputs, self._device)
        except Exception as error:  # A forward may fail in any way, for want of memory too.
            log.info("eager cannot be asked for strides of results: %s", first_line(error))
        self._known[key] = found
        return found


def with_strides(tensor: Tensor, strides: Strides) -> Tensor:
    """The tensor itself if it has these strides, else one with its values that has; in rows for
    None.
    """
    if strides is None:
        return tensor.contiguous()
    if tensor.stride() == strides:
        return tensor
    if same_places(tensor, strides):
        return tensor.as_strided(tensor.shape, strides)
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)
