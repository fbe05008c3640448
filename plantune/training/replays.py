"""How a training step runs: one replay for each kind of call on a GPU, op by op elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plantune.errors import CaptureError
from plantune.graph.nested import kind_of, tensors_in
from plantune.runtime.form import Form
from plantune.runtime.live_state import HeldTensors
from plantune.training.captured_step import Arguments, CapturedStep, UncapturedStep
from plantune.training.device_update import DeviceUpdate
from plantune.training.update import FlatGradients, TorchUpdate

# Such as whole batches and the last one of an epoch; of others the oldest goes.
MOST_KINDS = 4


@dataclass(frozen=True)
class Passes:
    """What a step is made of: `run` is forward and backward, which fills `gradients`."""

    run: Callable[[Arguments], Any]
    gradients: FlatGradients
    update: TorchUpdate | DeviceUpdate
    modules: tuple[nn.Module, ...]

    def __call__(self, given: Arguments) -> Any:
        value = self.run(given)
        self.update.follow()
        self.update.run()
        return value


@dataclass
class _Kind:
    """Calls of one kind: the first runs op by op, the second is captured."""

    calls: int = 0
    captured: CapturedStep | None = None
    present: list[bool] = field(default_factory=list)


class Replays:
    """The captured steps of one training step. What another optimizer than ours does is not part of
    them, as it may wait for the GPU: it follows each replay.
    """

    def __init__(self, passes: Passes, device: torch.device) -> None:
        self._passes, self._device = passes, device
        self._kinds: dict[Hashable, _Kind] = {}
        self._forms = self._new_forms()
        self._why_not: str | None = None

    def __call__(self, given: Arguments) -> Any:
        if self._why_not is not None or torch.cuda.is_current_stream_capturing():
            return self._passes(given)
        if any(form.changed() for form in self._forms):
            self.let_go()
            self._forms = self._new_forms()
        kind = self._kind(given)
        if kind is None:
            return self._passes(given)
        kind.calls += 1
        if kind.calls == 2:
            self._capture(kind, given)
        return self._passes(given) if kind.captured is None else self._replay(kind, given)

    def let_go(self) -> None:
        """Forgets what was captured; the next call of a kind is its first."""
        kinds, self._kinds = self._kinds, {}
        for kind in kinds.values():
            if kind.captured is not None:
                kind.captured.let_go()

    def _new_forms(self) -> list[Form]:
        return [Form(module, HeldTensors(module)) for module in self._passes.modules]

    def _kind(self, given: Arguments) -> _Kind | None:
        key = kind_of(given, _of_leaf)
        try:
            found = self._kinds.get(key)
        except TypeError:  # an argument that cannot be compared
            return None
        if found is None:
            found = self._kinds[key] = _Kind()
            if len(self._kinds) > MOST_KINDS:
                oldest = self._kinds.pop(next(iter(self._kinds)))
                if oldest.captured is not None:
                    oldest.captured.let_go()
        return found

    def _capture(self, kind: _Kind, given: Arguments) -> None:
        passes = self._passes
        ours = isinstance(passes.update, DeviceUpdate)
        passes.update.follow()
        try:
            kind.captured = CapturedStep(
                passes.run, passes.update.run if ours else None, given, passes.modules, self._device
            )
            kind.present = [*passes.gradients.present]
        except CaptureError as error:
            self._why_not = str(error)
            warnings.warn(
                f"the training step cannot be captured as one graph and runs op by op: {error}",
                UncapturedStep,
                stacklevel=4,
            )

    def _replay(self, kind: _Kind, given: Arguments) -> Any:
        assert kind.captured is not None
        passes = self._passes
        passes.gradients.present = kind.present
        passes.update.follow()
        value = kind.captured.replay(tensors_in(given))
        if isinstance(passes.update, TorchUpdate):
            passes.update.run()
        return value


def _of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    kept: Hashable = leaf
    return type(leaf), kept
