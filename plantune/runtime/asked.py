"""Refuses what `load_model` and `optimize` cannot take, each by its name."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from plantune.base.given import require_kind, require_value, require_whole, shown

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def refuse_tensors(own: Mapping[str, object]) -> None:
    """An input of the module may have the name of an option."""
    for name, value in own.items():
        if isinstance(value, Tensor):
            raise ValueError(f"{name} is optimize's own, got a tensor: give the module's by place")


def refuse_other_settings(
    name: object, in_channels: object, dtype: object, parameters: object, weights: object
) -> None:
    wanted = "the name of a network (a module of your own is for optimize)"
    require_kind("name", name, wanted, fits=isinstance(name, str))
    require_whole("in_channels", in_channels, 1)
    for which, value in {"dtype": dtype, "parameters": parameters}.items():
        if value is not None:
            wanted = ", ".join(map(str, FLOATS))
            require_kind(which, value, f"one of {wanted}", fits=isinstance(value, torch.dtype))
            require_value(which, value, f"one of {wanted}", fits=value in FLOATS)
    fits = weights is None or isinstance(weights, (Mapping, str, os.PathLike))
    require_kind("weights", weights, "a state_dict, or the path of a saved one", fits=fits)


def device_named(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        wanted = "a torch.device or the name of one, such as 'cpu' or 'cuda:0'"
        raise ValueError(f"device must be {wanted}, got {shown(device)}") from error
