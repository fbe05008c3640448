"""From gradients to weights: unscale, clip, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plantune.kernels.copies import Copies, Pair
from plantune.runtime.flat import FlatLayout
from plantune.runtime.program import current_stream
from plantune.space.arch import Arch
from plantune.training.loss_scale import LossScale

# As in torch.nn.utils.clip_grad_norm_.
CLIP_EPS = 1e-6


@dataclass(frozen=True)
class Rules:
    """What happens to gradients before the optimizer reads them."""

    max_norm: float | None = None
    scale: LossScale | None = None


class FlatGradients:
    """The gradients of one step, side by side, and which parameters have one."""

    def __init__(
        self, parameters: Sequence[Tensor], device: torch.device, arch: Arch | None = None
    ) -> None:
        self.parameters = parameters
        self.layout = FlatLayout.of({str(at): tensor for at, tensor in enumerate(parameters)})
        self.buffers = self.layout.buffers(device)
        self.views = [*self.layout.views(self.buffers).values()]
        self.present = [False] * len(self.views)
        self._device, self._copies = device, None if arch is None else Copies(arch, device)

    def take(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Those of a micro-batch; the first of a step has the number 0."""
        if number == 0:
            self.present = [gradient is not None for gradient in gradients]
        pairs: list[Pair] = []
        for at, (view, gradient) in enumerate(zip(self.views, gradients, strict=True)):
            if gradient is not None:
                self.present[at] = True
                if gradient.data_ptr() != view.data_ptr():  # else a pass has written it there
                    pairs.append((view, gradient))
            elif number == 0:
                view.zero_()
        self.write(pairs, adds=number > 0)

    def write(self, pairs: Sequence[Pair], *, adds: bool = False) -> None:
        """Enqueues copies, or additions."""
        if self._copies is not None:
            self._copies.launch(current_stream(self._device), pairs, adds=adds)
            return
        for view, gradient in pairs:
            view.add_(gradient) if adds else view.copy_(gradient)

    def norm(self) -> Tensor:
        """Of all gradients together, in float32 at least."""
        norms = [
            torch.linalg.vector_norm(buffer, dtype=torch.promote_types(buffer.dtype, torch.float32))
            for buffer in self.buffers.values()
        ]
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms]))
        return total.float()


class Update:
    """What a training step does with its gradients: `norm` and `found_inf` are of the last one.

    If it goes `inside`, a captured step holds what `enqueue` does; else `run` follows each replay.
    """

    inside = False
    norm: Tensor
    found_inf: Tensor

    def has_room(self) -> bool:
        """Whether there is memory for what the optimizer keeps with the settings it has now."""
        return True

    def follow(self) -> None:
        """Brings the device up to date with what a user may have changed on the host."""

    def run(self) -> None:
        raise NotImplementedError

    def enqueue(self) -> None:
        """`run` without waiting for the device."""
        self.run()

    def is_ready(self, present: Sequence[bool]) -> bool:
        """Whether it can be captured by now, for the parameters that have a gradient."""
        return True

    def baked(self, present: Sequence[bool]) -> Any:
        """What a capture now reads once, for `holds`."""
        return None

    def holds(self, baked: Any, present: Sequence[bool]) -> bool:
        """Whether what was captured is still what it would do."""
        return True

    def leave(self, reason: str) -> bool:
        """Stays outside of captured steps from now on; False if it cannot."""
        return False


class TorchUpdate(Update):
    """torch's own step of whichever optimizer, which sees these gradients for as long as it takes.
    A caller's `.grad` stays as it is.
    """

    def __init__(self, optimizer: Optimizer, gradients: FlatGradients, rules: Rules) -> None:
        self._optimizer, self._gradients, self._rules = optimizer, gradients, rules
        self._device = gradients.parameters[0].device
        self.norm = torch.zeros((), device=self._device)
        self.found_inf = torch.zeros(1, device=self._device)

    def run(self) -> None:
        """Waits for the device where there is a loss scale."""
        self._measure()
        if self._rules.scale is None or not self.found_inf:
            self._clip()
            self._step()
        self._rescale()

    def _measure(self) -> None:
        """Unscales the gradients; their norm, and whether they are finite."""
        self.found_inf.zero_()
        if self._rules.scale is not None:
            inverse = self._rules.scale.scale.double().reciprocal().float()
            buffers = [*self._gradients.buffers.values()]
            torch._amp_foreach_non_finite_check_and_unscale_(buffers, self.found_inf, inverse)
        self.norm.copy_(self._gradients.norm())

    def _clip(self) -> None:
        if self._rules.max_norm is None:
            return
        factor = (self._rules.max_norm / (self.norm + CLIP_EPS)).clamp(max=1.0)
        # Not the buffers: NaN would stay between the gradients.
        torch._foreach_mul_(self._gradients.views, factor)

    def _rescale(self) -> None:
        if self._rules.scale is not None:
            self._rules.scale.update(self.found_inf)

    def _step(self) -> None:
        gradients = self._gradients
        kept = [parameter.grad for parameter in gradients.parameters]
        triples = zip(gradients.parameters, gradients.views, gradients.present, strict=True)
        try:
            for parameter, view, there in triples:
                parameter.grad = view if there else None
            self._optimizer.step()
        finally:
            for parameter, grad in zip(gradients.parameters, kept, strict=True):
                parameter.grad = grad
