"""How a training step runs: one replay for each kind of call on a GPU, op by op elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plantune.base.warning import warn
from plantune.errors import CaptureError
from plantune.graph.nested import kind_of, tensors_in
from plantune.runtime.watched.live_state import OwnedTensors
from plantune.runtime.watched.module_signature import ModuleSignature
from plantune.training.captured_step import Arguments, CapturedStep, UncapturedStep
from plantune.training.ranks import Ranks
from plantune.training.turns import Parts, Turns, parts_of, what_changed, what_differs
from plantune.training.update import FlatGradients, Update

# Such as whole batches and the last one of an epoch; of others the one goes that was used least
# recently.
MOST_KINDS = 4
# A rank captures only when all do, which those with batches of other sizes may never do.
MOST_TRIES = 3


@dataclass(frozen=True)
class Passes:
    """What a step is made of: `run` is forward and backward, which fills `gradients`. It takes the
    arguments, and what is state of the end of each part. `seen` counts calls of the model
    whose inputs more than a plan may have read. `settings` are what else decides what a call does:
    a captured one would keep it. `state` is what `run` changes beside weights.
    """

    run: Callable[..., Any]
    gradients: FlatGradients
    update: Update
    modules: tuple[nn.Module, ...]
    seen: Callable[[], int] | None = None
    settings: Callable[[], Hashable] = lambda: None
    state: Callable[[], list[Tensor]] = list

    def __call__(self, given: Arguments, mark: Callable[[str], None] | None = None) -> Any:
        value = self.run(given, mark)
        self.update.follow()
        self.update.run()
        if mark is not None:
            mark("optimizer")
        return value


@dataclass
class _Kind:
    """Calls of one kind: the first runs op by op, the second is captured.

    Unless it is `whole`, the optimizer follows each replay; `baked` is what its step read once.
    """

    calls: int = 0
    tries: int = 0
    captured: CapturedStep | None = None
    present: list[bool] = field(default_factory=list)
    whole: bool = False
    baked: Any = None
    parts: Parts = field(default_factory=dict)


class Replays:
    """The captured steps of one training step. An optimizer that cannot be a part of them, since it
    may wait for the GPU, follows each replay.
    """

    def __init__(
        self,
        passes: Passes,
        device: torch.device,
        ranks: Ranks | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._passes, self._device, self._ranks = passes, device, ranks
        self._turns = turns or Turns()
        self._kinds: dict[Hashable, _Kind] = {}
        self._signatures = self._new_signatures()
        self._why_not: str | None = None

    def __call__(self, given: Arguments) -> Any:
        if self._why_not is not None or torch.cuda.is_current_stream_capturing():
            return self._passes(given)
        self._turns.call()
        if any(signature.changed() for signature in self._signatures):
            self.let_go()
            before, self._signatures = self._signatures, self._new_signatures()
            state = self._passes.modules, before, self._signatures
            self._turns.lose(lambda: what_changed(*state))
        kind = self._kind(given)
        if kind is None:
            return self._passes(given)
        update = self._passes.update
        if kind.captured is not None and not update.holds(kind.baked, kind.present):
            self.let_go()
            return self(given)
        kind.calls += 1
        if kind.calls > 1 and kind.captured is None and update.is_ready(kind.present):
            self._capture_together(kind, given)
        if kind.captured is not None:
            return self._replay(kind, given)
        value = self._passes(given)
        kind.present = [*self._passes.gradients.present]
        return value

    @property
    def passes(self) -> Passes:
        return self._passes

    def let_go(self) -> None:
        """Forgets what was captured; the next call of a kind is its first."""
        kinds, self._kinds = self._kinds, {}
        for kind in kinds.values():
            if kind.captured is not None:
                kind.captured.let_go()

    def abandon(self) -> None:
        """Drops the graphs at the end of the process: the GPU may wait in them for ever."""
        for kind in [*self._kinds.values()]:
            if kind.captured is not None:
                kind.captured.abandon()

    def _new_signatures(self) -> list[ModuleSignature]:
        return [ModuleSignature(module, OwnedTensors(module)) for module in self._passes.modules]

    def _kind(self, given: Arguments) -> _Kind | None:
        settings = self._passes.settings()
        key = settings, kind_of(given, _of_leaf)
        try:
            found = self._kinds.pop(key, None)
        except TypeError:  # an argument that cannot be compared
            return None
        if found is None:
            found = _Kind(parts=parts_of(settings, given))
            if len(self._kinds) >= MOST_KINDS:
                self._drop_one(found)
        self._kinds[key] = found  # as the last one
        return found

    def _drop_one(self, new: _Kind) -> None:
        """Makes room for a new kind."""
        every = [kind.parts for kind in (*self._kinds.values(), new)]
        oldest = self._kinds.pop(next(iter(self._kinds)))
        if oldest.captured is not None:
            oldest.captured.let_go()
        self._turns.lose(lambda: what_differs(every, MOST_KINDS))

    def _capture_together(self, kind: _Kind, given: Arguments) -> None:
        """Of several ranks all capture in the same call, with no collective in flight, or none."""
        ranks = self._ranks
        if ranks is None:
            self._capture(kind, given)
            return
        if kind.tries >= MOST_TRIES:
            return
        kind.tries += 1
        torch.cuda.synchronize(self._device)
        if not ranks.all_say(f"captures, try {kind.tries}"):
            return
        self._capture(kind, given)
        if not ranks.all_say("" if kind.captured is None else "captured") and kind.captured:
            kind.captured.let_go()
            kind.captured, kind.tries = None, MOST_TRIES

    def _capture(self, kind: _Kind, given: Arguments) -> None:
        passes, update = self._passes, self._passes.update
        update.follow()
        enqueue = update.for_capture() if update.inside else None
        # Ranks reduce gradients that are side by side.
        in_place = update.reads_in_place and self._ranks is None
        places = passes.gradients.left_in_place() if in_place else nullcontext()
        try:
            with places:
                captured = CapturedStep(
                    *(passes.run, enqueue, given, passes.state(), self._device),
                    seen=passes.seen,
                )
        except CaptureError as error:
            if update.leave(str(error)):
                self._capture(kind, given)
            else:
                self._report(str(error))
            return
        kind.present, kind.whole = [*passes.gradients.present], update.inside
        if update.is_ready(kind.present):
            kind.captured, kind.baked = captured, update.baked(kind.present)
        else:
            captured.let_go()  # in it the optimizer would begin anew each time

    def _report(self, why_not: str) -> None:
        self._why_not = why_not
        warn(
            f"the training step cannot be captured as one graph and runs op by op: {why_not}",
            UncapturedStep,
        )

    def _replay(self, kind: _Kind, given: Arguments) -> Any:
        assert kind.captured is not None
        passes = self._passes
        passes.gradients.present = kind.present
        passes.update.follow()
        if self._ranks is not None:
            self._ranks.past()
        value = kind.captured.replay(tensors_in(given))
        if not kind.whole:
            passes.update.run()
        return value


def _of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    kept: Hashable = leaf
    return type(leaf), kept
