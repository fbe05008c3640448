"""What proofs keep in memory: references and inputs, while there is room."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import is_dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from plantune.devices.device import Device

# The rest of a processor's memory is for candidates. Of a GPU's they need little, and references of
# 8,192 images that are not kept are computed again for each of them.
PART_OF_MEMORY, PART_OF_FREE = 16, 3


T = TypeVar("T")


class Kept:
    """Values that hold no more than `limit_bytes` together; those unused for longest go first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value under a key, made if it is missing. One over the limit is not kept."""
        if key in self._values:
            self._values.move_to_end(key)
            return cast(T, self._values[key][0])
        made = make()
        size = sum({x.data_ptr(): x.nbytes for x in tensors_in(made)}.values())
        if size <= self._limit:
            self._values[key] = made, size
            self._bytes += size
        while self._bytes > self._limit:
            _, (_, gone) = self._values.popitem(last=False)
            self._bytes -= gone
        return made

    def forget(self) -> None:
        self._values.clear()
        self._bytes = 0


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those in the fields of a value, and in tuples there; some may be the same."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple) or is_dataclass(value):
        for item in value if isinstance(value, tuple) else vars(value).values():
            yield from tensors_in(item)


def room_on(device: Device) -> int:
    """The bytes that may be kept in the memory of a processor."""
    if device.place.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device.place)
        reserved = torch.cuda.memory_reserved(device.place)
        unused = reserved - torch.cuda.memory_allocated(device.place)
        return int(free + unused) // PART_OF_FREE
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // PART_OF_MEMORY
