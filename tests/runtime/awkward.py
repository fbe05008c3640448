"""Views, and other tensors of the right shape, of a batch of two images."""

from __future__ import annotations

import torch
from torch import nn


def with_offset(x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


AWKWARD = {
    "sliced batch": lambda x: torch.cat([x, x + 1])[1:3],
    "every second": lambda x: torch.cat([x, x + 1])[::2],
    "sliced channels": lambda x: torch.cat([x, x], 1)[:, 1:4],
    "strided": lambda x: torch.cat([x, x], 3)[..., 1::2],
    "expanded batch": lambda x: x[:1].expand(2, -1, -1, -1),
    "expanded channels": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "transposed": lambda x: x.transpose(2, 3),
    "flipped": lambda x: x.flip(0),
    "permuted": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "misaligned": with_offset,
    "misaligned leaf": lambda x: with_offset(x).requires_grad_(),
    "a parameter": nn.Parameter,
}
