"""From gradients to weights: unscale, clip, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
                pairs.append((view, gradient))
            elif number == 0:
                view.zero_()
        self._write(pairs, adds=number > 0)

    def _write(self, pairs: Sequence[Pair], *, adds: bool) -> None:
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


class TorchUpdate:
    """torch's own step of whichever optimizer, which sees these gradients for as long as it takes.
    A caller's `.grad` stays as it is.
    """

    def __init__(self, optimizer: Optimizer, gradients: FlatGradients, rules: Rules) -> None:
        self._optimizer, self._gradients, self._rules = optimizer, gradients, rules
        self._device = gradients.parameters[0].device
        self.norm = torch.zeros((), device=self._device)
        self.found_inf = torch.zeros(1, device=self._device)

    def follow(self) -> None:
        """Nothing: it reads what the user may have changed when it runs."""

    def run(self) -> None:
        gradients, rules = self._gradients, self._rules
        buffers = [*gradients.buffers.values()]
        self.found_inf = torch.zeros(1, device=self._device)
        if rules.scale is not None:
            inverse = rules.scale.scale.double().reciprocal().float()
            torch._amp_foreach_non_finite_check_and_unscale_(buffers, self.found_inf, inverse)
        self.norm = gradients.norm()
        if not self.found_inf:
            if rules.max_norm is not None:
                factor = (rules.max_norm / (self.norm + CLIP_EPS)).clamp(max=1.0)
                for buffer in buffers:
                    buffer.mul_(factor)
            self._step()
        if rules.scale is not None:
            rules.scale.update(self.found_inf)

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
