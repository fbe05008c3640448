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
