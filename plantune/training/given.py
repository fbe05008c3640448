"""Refuses what a training step cannot be made of, each by its name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from plantune.base.given import require_kind, require_number, require_value, require_whole
from plantune.training.groups import Group
from plantune.training.loss_scale import LossScale

WIRES = (None, torch.float16, torch.bfloat16)


def refuse_other_parts(model: Any, loss: Any, optimizer: Any) -> None:
    """A class in the place of its object is a frequent slip."""
    require_kind("model", model, "an nn.Module", fits=isinstance(model, nn.Module))
    wanted = "a function, or a loss module that is made"
    require_kind("loss", loss, wanted, fits=_can_be_called(loss))
    is_optimizer = isinstance(optimizer, Optimizer)
    require_kind("optimizer", optimizer, "a torch.optim.Optimizer", fits=is_optimizer)


def refuse_other_settings(
    micro_batches: Any, max_norm: Any, scale: Any, autocast: Any, others: tuple[Any, Any, Any]
) -> None:
    """`others` are the process group, the dtype of what is sent, and the deadline."""
    require_whole("micro_batches", micro_batches, 1)
    if max_norm is not None:
        require_number("max_norm", max_norm, "a number above 0, or None", lambda norm: norm > 0)
    _refuse_scalers(scale)
    if autocast is not None:
        wanted = "a torch.dtype of floats, or None"
        require_kind("autocast", autocast, wanted, fits=isinstance(autocast, torch.dtype))
        require_value("autocast", autocast, wanted, fits=autocast.is_floating_point)
    group, wire, deadline_s = others
    wanted = "a process group, such as torch.distributed.group.WORLD after init_process_group()"
    require_kind("process_group", group, wanted, fits=group is None or isinstance(group, Group))
    wanted = "torch.float16, torch.bfloat16 or None"
    require_value("reduce_dtype", wire, wanted, fits=any(wire is each for each in WIRES))
    wanted = "a number of seconds above 0"
    require_number("deadline_s", deadline_s, wanted, lambda seconds: seconds > 0)


def _refuse_scalers(scale: object) -> None:
    """torch's own moves its scale on the host, after each step."""
    wanted = (
        "a plantune.LossScale or None (a GradScaler's state goes on in one: "
        "LossScale().load_state_dict(scaler.state_dict()))"
    )
    require_kind("scale", scale, wanted, fits=scale is None or isinstance(scale, LossScale))


def _can_be_called(loss: Any) -> bool:
    return callable(loss) and not (isinstance(loss, type) and issubclass(loss, nn.Module))
