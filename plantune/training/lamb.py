"""LAMB, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plantune.base.given import is_number, require_flag, require_kind, require_number, require_value


class LAMB(Optimizer):
    """Adam whose step for each tensor is as long as the tensor's norm times `lr` (You et al., 2019,
    https://arxiv.org/abs/1904.00962).

    Weight decay is part of the direction. `bias_correction` is Adam's.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        maximize: bool = False,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not isinstance(value, Tensor):  # of which torch's optimizers take some
                require_number(name, value, "a number, 0 or more", lambda number: number >= 0)
        wanted = "two numbers from 0 to below 1"
        are_two = isinstance(betas, (tuple, list)) and len(betas) == 2
        require_kind("betas", betas, wanted, fits=are_two and all(map(is_number, betas)))
        require_value("betas", betas, wanted, fits=all(0 <= beta < 1 for beta in betas))
        require_flag("bias_correction", bias_correction)
        require_flag("maximize", maximize)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return value

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        first, second = group["betas"]
        gradient = -gradient if group["maximize"] else gradient
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        of_first = of_second = 1.0
        if group["bias_correction"]:
            step = float(state["step"])
            of_first, of_second = 1 - first**step, 1 - second**step
        direction = (mean / of_first) / ((square / of_second).sqrt() + group["eps"])
        direction.add_(parameter, alpha=group["weight_decay"])
        norms = parameter.norm(), direction.norm()
        both = (norms[0] > 0) & (norms[1] > 0)
        trust = torch.where(both, norms[0] / norms[1], torch.ones_like(norms[0]))
        parameter.sub_(direction * (trust * group["lr"]))
