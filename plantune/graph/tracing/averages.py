"""Batch norms whose running statistics are averages over all batches (`momentum=None`)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def averages_all(module: nn.Module) -> bool:
    """Whether a module's forward would ask for the number of batches so far as a Python number."""
    return (
        isinstance(module, _BatchNorm)
        and type(module).forward is _BatchNorm.forward
        and module.momentum is None
        and module.training
        and module.num_batches_tracked is not None
    )


def forward(norm: _BatchNorm, x: Tensor) -> Tensor:
    """What its own forward computes, with that number as a tensor."""
    norm._check_input_dim(x)
    mean, var = norm.running_mean, norm.running_var
    assert mean is not None
    assert var is not None
    assert norm.num_batches_tracked is not None
    before = mean.clone(), var.clone()
    y = F.batch_norm(x, mean, var, norm.weight, norm.bias, True, 1.0, norm.eps)
    norm.num_batches_tracked.add_(1)
    part = 1 / norm.num_batches_tracked.to(mean.dtype)
    for statistic, old in zip((mean, var), before, strict=True):
        statistic.copy_((1 - part) * old + part * statistic)
    return y
