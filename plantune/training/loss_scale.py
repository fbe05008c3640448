"""The factor of a loss whose 16-bit gradients would vanish without it."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import torch
from torch import Tensor

from plantune.base.given import require_number, require_whole


class LossScale:
    """Grows while gradients stay finite and shrinks when they do not, as torch's GradScaler does,
    on the device alone: nothing waits for it. Its state_dict is that of a GradScaler.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        require_number("init_scale", init_scale, "a finite number above 0", lambda x: 0 < x < inf)
        wanted = "a finite number above 1"
        require_number("growth_factor", growth_factor, wanted, lambda x: 1 < x < inf)
        wanted = "a number between 0 and 1"
        require_number("backoff_factor", backoff_factor, wanted, lambda x: 0 < x < 1)
        require_whole("growth_interval", growth_interval, 1)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self._scale = torch.tensor([init_scale], dtype=torch.float32)
        self._growth = torch.zeros(1, dtype=torch.int32)

    @property
    def scale(self) -> Tensor:
        """The factor now, on the device."""
        return self._scale

    @property
    def growth(self) -> Tensor:
        """Finite steps since it last changed, on the device."""
        return self._growth

    def place(self, device: torch.device) -> None:
        """Keeps it on that device from now on."""
        self._scale, self._growth = self._scale.to(device), self._growth.to(device)

    def update(self, found_inf: Tensor) -> None:
        """Enqueues what follows from a step: `found_inf` is 0 where all gradients were finite."""
        torch._amp_update_scale_(
            self._scale,
            self._growth,
            found_inf,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": float(self._scale),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self._growth),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scale.fill_(state["scale"])
        self._growth.fill_(state["_growth_tracker"])
        self.growth_factor = state["growth_factor"]
        self.backoff_factor = state["backoff_factor"]
        self.growth_interval = state["growth_interval"]
