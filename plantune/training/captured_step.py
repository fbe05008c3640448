"""A training step on a GPU as one replay."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plantune.devices.cuda.flags import autotuned
from plantune.errors import CaptureError, PlantuneWarning
from plantune.graph.nested import mapped, tensors_in
from plantune.runtime.captured.claims import Claim, MovingInput, claimed, moving_input
from plantune.runtime.captured.current_gpu import on_its_gpu
from plantune.runtime.captured.program_pool import Keeper
from plantune.runtime.captured.recorder import Recorded, Recorder
from plantune.runtime.captured.rehearsal import rehearsing

# As TrainStep's: inputs of the model, and what its loss gets beside them.
Arguments = tuple[tuple[Any, ...], tuple[Any, ...]]
PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class UncapturedStep(PlantuneWarning):
    """A training step waits for the GPU or the host in its middle, so it is not one replay."""


class CapturedStep:
    """What one kind of call does, as one graph. Tensors among its arguments are copied to where the
    graph reads them, and results out of it.
    """

    def __init__(
        self,
        run: Callable[[Arguments], Any],
        update: Callable[[], Callable[[], None] | None] | None,
        given: Arguments,
        state: Sequence[Tensor],
        device: torch.device,
        *,
        seen: Callable[[], int] | None = None,
    ) -> None:
        """`run` is the forward and backward pass, which must have run once; it changes nothing but
        `state`. `update` follows it, and what that returns follows the capture. `seen` counts calls
        of the model whose inputs more than a plan may have read. Raises CaptureError.
        """
        self.device, self._index = device, device.index
        self._keeper = Keeper()
        self._own: list[Tensor] = []
        # In the place of copies that nothing reads.
        self._moving: dict[int, MovingInput] = {}
        own = mapped(self._taken, given)
        self._value: Any = None
        self._settle: Callable[[], None] | None = None

        claims: list[Claim] = []

        def whole() -> None:
            with claimed(claims):
                self._value = run(own)
            self._settle = None if update is None else update()

        # An autograd graph that waits for the collector keeps the nodes of its parameters, and the
        # next one takes them: of the default stream, which a capture must not touch.
        gc.collect()
        saved = [(tensor, tensor.clone()) for tensor in state]
        try:
            before = None if seen is None else seen()
            with self._keeper.keeping():
                self._recorded = _recorded(device, whole, lambda: _rehearsed(run, own))
            if self._settle is not None:
                self._settle()
            if seen is not None and seen() == before:
                self._move(len(tensors_in(given[0])), claims)
        except BaseException:
            self._keeper.let_go()
            raise
        finally:
            for tensor, value in saved:
                tensor.copy_(value)

    def _taken(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        self._own.append(leaf.detach().clone(memory_format=torch.preserve_format))
        return self._own[-1].requires_grad_(leaf.requires_grad)

    def _move(self, inputs: int, claims: Sequence[Claim]) -> None:
        """The first tensors are the model's inputs."""
        executable = self._recorded.executable
        for at, own in enumerate(self._own[:inputs]):
            moving = moving_input(own, claims, executable)
            if moving is not None:
                self._moving[at] = moving
                self._own[at] = own.to("meta")

    @on_its_gpu
    @torch.no_grad()
    def replay(self, tensors: list[Tensor]) -> Any:
        """What the loss returns for these tensors, in memory of the caller's."""
        for at, (own, tensor) in enumerate(zip(self._own, tensors, strict=True)):
            if at in self._moving:
                self._moving[at].take(tensor)
            else:
                own.copy_(tensor)
        self._recorded.graph.replay()
        return mapped(_copied, self._value)

    def abandon(self) -> None:
        """Drops the graph, though the GPU may be in it: for the end of the process."""
        self._recorded.graph.reset()

    def let_go(self) -> None:
        """Frees its memory; it cannot be replayed afterwards."""
        torch.cuda.synchronize(self.device)
        del self._recorded, self._value, self._settle
        self._own, self._moving = [], {}
        self._keeper.let_go()


def _rehearsed(run: Callable[[Arguments], Any], own: Arguments) -> None:
    with rehearsing():
        run(own)


def _recorded(
    device: torch.device, whole: Callable[[], None], warm_up: Callable[[], Any]
) -> Recorded:
    try:
        # What no plan runs is the framework's at its best, as in a plan.
        deterministic = torch.are_deterministic_algorithms_enabled()
        with torch.no_grad(), autotuned(deterministic=deterministic):
            return Recorder(device).graph(whole, True, warm_up)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        said = str(error).strip().partition("\n")[0]
        raise CaptureError(f"{said}{_line_of(error)}") from error


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _line_of(error: BaseException) -> str:
    """The last line of the user's code that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith((*PACKAGES, "<"))]
    return f", at {outside[-1].filename}:{outside[-1].lineno}" if outside else ""
