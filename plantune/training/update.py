"""From gradients to weights: unscale, clip, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from plantune.runtime.flat import FlatLayout
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

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self.parameters = parameters
        layout = FlatLayout.of({str(at): tensor for at, tensor in enumerate(parameters)})
        self.buffers = layout.buffers(device)
        self.views = [*layout.views(self.buffers).values()]
        self.present = [False] * len(self.views)

    def take(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Those of a micro-batch; the first of a step has the number 0."""
        if number == 0:
            self.present = [gradient is not None for gradient in gradients]
        for at, (view, gradient) in enumerate(zip(self.views, gradients, strict=True)):
            if gradient is None:
                if number == 0:
                    view.zero_()
            elif number == 0:
                view.copy_(gradient)
            else:
                self.present[at] = True
                view.add_(gradient)

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
