"""One training step as one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plantune.training.loss_pass import LossPass
from plantune.training.loss_scale import LossScale
from plantune.training.models import Models
from plantune.training.random_state import load_random_state, random_state
from plantune.training.update import FlatGradients, Rules, TorchUpdate


class TrainStep:
    """`value = step(x, y)`: forward, `loss(model(x), y)`, backward, and a step of the optimizer.

    `x` is the model's input, or a tuple of its inputs; what follows goes to the loss. The loss is
    any callable that returns one number, or a tuple that begins with it; the call returns the same,
    detached, in memory of the caller's. The model runs from its plan; a tuned module keeps the plan
    that it has. Weights, and the optimizer's groups and state, stay where they are: schedulers,
    evaluation between steps and checkpoints see them as ever, and `.grad` is left alone.

    `micro_batches` splits each batch into so many equal parts and takes their mean. `max_norm`
    clips gradients as torch.nn.utils.clip_grad_norm_ does. With a `scale` steps whose gradients are
    not finite are left out. `autocast` is the dtype under which model and loss run.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        optimizer: Optimizer,
        *,
        micro_batches: int = 1,
        max_norm: float | None = None,
        scale: LossScale | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        if micro_batches < 1:
            raise ValueError(f"micro_batches counts from 1 on, got {micro_batches}")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.micro_batches = micro_batches
        self.autocast = autocast
        self._rules = Rules(max_norm, scale)
        self._models = Models(model)
        self._parameters: list[Tensor] = []
        self._places: list[tuple[object, ...]] = []
        self._follow_parameters()

    @property
    def scale(self) -> LossScale | None:
        return self._rules.scale

    @property
    def gradient_norm(self) -> Tensor:
        """That of the last step's gradients, unscaled and before they were clipped."""
        return self._update.norm.clone()

    @property
    def found_inf(self) -> Tensor:
        """1 if the last step was left out because its gradients were not finite, else 0."""
        return self._update.found_inf.clone()

    def __call__(self, inputs: Any, *targets: Any) -> Any:
        self._follow_parameters()
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        value = self._pass.run(given, targets, self._scaled_by, self._gradients.take)
        self._update.run()
        return value

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs, beside the model's own state, to go on exactly: the optimizer's
        state, the loss scale and torch's random numbers.
        """
        return {
            "optimizer": self.optimizer.state_dict(),
            "scale": None if self.scale is None else self.scale.state_dict(),
            "random": random_state(self._device),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (state["scale"] is None) != (self.scale is None):
            raise ValueError(
                "the state was saved with a loss scale and this step has none, or the other way "
                "round: make the step with the same `scale`"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scale is not None:
            self.scale.load_state_dict(state["scale"])
        load_random_state(state["random"], self._device)

    @property
    def _scaled_by(self) -> Tensor | None:
        return None if self.scale is None else self.scale.scale

    def _follow_parameters(self) -> None:
        """The parameters of the optimizer's groups that are trained now, wherever they are."""
        groups = self.optimizer.param_groups
        found = [p for group in groups for p in group["params"] if p.requires_grad]
        places: list[tuple[object, ...]] = [(id(p), p.data_ptr(), p.stride()) for p in found]
        if self._parameters and places == self._places:
            return
        self._device = _device_of(found)
        self._parameters, self._places = found, places
        if self.scale is not None:
            self.scale.place(self._device)
        self._gradients = FlatGradients(found, self._device)
        autocast = None if self.autocast is None else (self._device.type, self.autocast)
        self._pass = LossPass(self._models, self.loss, found, self.micro_batches, autocast)
        self._update = TorchUpdate(self.optimizer, self._gradients, self._rules)


def _device_of(parameters: list[Tensor]) -> torch.device:
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none that requires a gradient"
        raise ValueError(f"the optimizer's parameters must be on one device, got {found}")
    return devices.pop()
