"""What a measure is asked for, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from timing import Race

Row = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What is asked of a network. On a GPU it runs in float16, as it would be served there."""

    mode: str = "infer"
    image_size: int = 64
    batch: int = 2
    arch: str = "sm90"
    device: str = "cpu"
    race: Race = field(default_factory=Race)
    budget_s: float = 120.0
    # On time.monotonic's clock, which all processes of a machine share.
    compile_until: float = float("inf")
    # Whether a search has the first cores for its own compilers.
    beside_search: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.float16
