"""What is made once and used again, as much of it as there is room for."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from plantune.device import Device

# The rest of a processor's memory is for candidates.
PART_OF_MEMORY = 16


class Holder(Protocol):
    """What holds tensors."""

    def tensors(self) -> Iterable[Tensor]:
        """All of them; some may be the same."""


Made = TypeVar("Made", bound=Holder)


class Kept:
    """Values that hold no more than `limit_bytes` together; those unused for longest go first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held: OrderedDict[Hashable, tuple[Holder, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """The value under a key, made where it is not there. One over the limit is not kept."""
        if key in self._held:
            self._held.move_to_end(key)
            return cast(Made, self._held[key][0])
        made = make()
        size = sum({x.data_ptr(): x.nbytes for x in made.tensors()}.values())
        if size <= self._limit:
            self._held[key] = made, size
            self._bytes += size
        while self._bytes > self._limit:
            _, (_, gone) = self._held.popitem(last=False)
            self._bytes -= gone
        return made

    def forget(self) -> None:
        self._held.clear()
        self._bytes = 0


def room_on(device: Device) -> int:
    """The bytes that may be kept in the memory of a processor."""
    if device.place.type == "cuda":
        return int(torch.cuda.get_device_properties(device.place).total_memory) // PART_OF_MEMORY
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // PART_OF_MEMORY
