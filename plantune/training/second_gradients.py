"""What becomes of a loss that takes gradients of gradients, which plans do not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plantune.errors import NoSecondGradient
from plantune.runtime.watched.torch_internals import is_capturing
from plantune.training.models import Models
from plantune.training.random_state import load_random_state, random_state


@dataclass
class PlansOrModel:
    """Forward and backward pass from the plans of `models`. A loss such as a penalty for gradients
    has the model run itself from then on; what the pass that broke did to `state` and to torch's
    random numbers is taken back.
    """

    run: Callable[..., Any]
    models: Models
    state: Callable[[], list[Tensor]]
    device: torch.device

    def __call__(self, *given: Any) -> Any:
        take_back = self._kept()
        try:
            return self.run(*given)
        except NoSecondGradient as error:
            if not self.models.run_themselves(str(error)):
                raise
            take_back()
            return self.run(*given)

    def _kept(self) -> Callable[[], object]:
        if self.models.are_left or (self.device.type == "cuda" and is_capturing()):
            return list
        random = random_state(self.device)
        tensors = [(tensor, tensor.clone()) for tensor in self.state()]

        @torch.no_grad()
        def take_back() -> None:
            load_random_state(random, self.device)
            for tensor, before in tensors:
                tensor.copy_(before)

        return take_back
