"""Refuses what a training step cannot be made of, each by its name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def refuse_other_kinds(
    model: Any, loss: Any, optimizer: Any, micro_batches: Any, autocast: Any
) -> None:
    """Raises TypeError. A class in the place of its object is a frequent slip."""
    known = {
        "model": (model, isinstance(model, nn.Module), "an nn.Module"),
        "loss": (loss, _can_be_called(loss), "a function, or a loss module that is made"),
        "optimizer": (optimizer, isinstance(optimizer, Optimizer), "a torch.optim.Optimizer"),
        "micro_batches": (micro_batches, isinstance(micro_batches, int), "a whole number"),
        "autocast": (autocast, isinstance(autocast, torch.dtype | None), "a torch.dtype or None"),
    }
    for name, (value, fits, wanted) in known.items():
        if not fits:
            got = f"the class {value.__name__}" if isinstance(value, type) else _kind(value)
            raise TypeError(f"{name} is {wanted}, got {got}")


def _can_be_called(loss: Any) -> bool:
    return callable(loss) and not (isinstance(loss, type) and issubclass(loss, nn.Module))


def _kind(value: Any) -> str:
    return f"{value!r}" if isinstance(value, (str, bool, int, float)) else type(value).__name__
