"""Tensors side by side in one piece of memory for each dtype, each with strides of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.kernels.weights.jobs import extent_of
from plantune.runtime.watched.torch_internals import part_of

# Every tensor begins where a vector load may.
SLOT_BYTES = 16
Buffers = Mapping[torch.dtype, Tensor]


@dataclass(frozen=True)
class Slot:
    """The place of one tensor, counted in elements."""

    dtype: torch.dtype
    start: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.shape.numel()


@dataclass(frozen=True)
class FlatLayout:
    """The slots by the names of their tensors, in order, and the elements of each buffer."""

    slots: Mapping[str, Slot]
    sizes: Mapping[torch.dtype, int]

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> FlatLayout:
        """Room for tensors like these: with their strides, if they leave no gaps."""
        slots: dict[str, Slot] = {}
        sizes: dict[torch.dtype, int] = {}
        for name, tensor in tensors.items():
            step = SLOT_BYTES // tensor.element_size()
            start = sizes.get(tensor.dtype, 0)
            slots[name] = Slot(tensor.dtype, start, tensor.shape, dense_strides(tensor))
            sizes[tensor.dtype] = start + -(-tensor.numel() // step) * step
        return FlatLayout(slots, sizes)

    def buffers(self, device: torch.device) -> dict[torch.dtype, Tensor]:
        """Memory of its own, filled with zeros."""
        return {
            dtype: torch.zeros(size, dtype=dtype, device=device)
            for dtype, size in self.sizes.items()
        }

    def parts(self, buffers: Buffers) -> dict[str, Tensor]:
        """As `views`, but writing to one does not bump the versions of the others."""
        return {
            name: part_of(buffers[slot.dtype], slot.shape, slot.stride, slot.start)
            for name, slot in self.slots.items()
        }

    def views(self, buffers: Buffers) -> dict[str, Tensor]:
        return {
            name: buffers[slot.dtype].as_strided(slot.shape, slot.stride, slot.start)
            for name, slot in self.slots.items()
        }


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides, or those of rows if its elements leave gaps or overlap."""
    if is_dense(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether the elements of both, of one shape, are stored in one order and as one dtype."""
    wide = [axis for axis, size in enumerate(one.shape) if size > 1]
    strides = [(one.stride(axis), other.stride(axis)) for axis in wide]
    return one.dtype == other.dtype and all(first == second for first, second in strides)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a piece of memory, each place once."""
    if extent_of(tensor) != tensor.numel():
        return False
    wanted = 1
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in steps if size > 1):
        if stride != wanted:
            return False
        wanted *= size
    return True
