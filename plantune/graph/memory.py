"""Where a traced tensor is: torch may hand out several objects for one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Memory(NamedTuple):
    """Views share the storage of their base."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def memory_of(tensor: Tensor) -> Memory:
    storage = int(tensor.untyped_storage()._cdata)
    offset = int(tensor.storage_offset())
    return Memory(storage, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def in_rows(tensor: Tensor) -> Tensor:
    """Row-major, by its strides too: where a size is one, as in 1x1 filters, `contiguous` leaves
    those of channels_last, and torch then computes in channels_last.
    """
    rows = torch.empty(tensor.shape, device="meta").stride()
    return tensor.contiguous().as_strided(tensor.shape, rows)
