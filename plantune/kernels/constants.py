"""Constants of a step in the order and dtype in which its kernel reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plantune.graph.step import Step

if TYPE_CHECKING:
    from plantune.kernels.family import Frame

ALIGNMENT_BYTES = 16  # of what a kernel reads in place
Order = Callable[[Tensor], Tensor]


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def flat(tensor: Tensor) -> Tensor:
    """The elements in a row."""
    return tensor.reshape(-1)


def by_pixels(weight: Tensor) -> Tensor:
    """A convolution's weight as (O, R, S, C): in channels_last memory it has this form."""
    return weight.permute(0, 2, 3, 1)


@dataclass(frozen=True)
class Room:
    """Memory to be made when it is first needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Constant:
    """The value `name` as a kernel reads it.

    It is read in place if that is allowed and it has this form already. Otherwise each pass fills
    memory of the kernel's own with it: `order` views the value such that its elements come as in
    that memory, to which they are broadcast and cast. One that `packs` may also copy and pad with
    zeros, whatever dtype it is given.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        name: str,
        memory: Tensor | Room,
        order: Order = flat,
        *,
        packs: bool = False,
        in_place: bool = False,
        alignment_bytes: int = ALIGNMENT_BYTES,
    ) -> None:
        self.name = name
        self.order = order
        self.packs = packs
        self._values = values
        self._in_place = in_place
        # Whether the pass computes the value itself, so that it has no address before.
        self.is_derived = False
        self._alignment_bytes = alignment_bytes
        self._memory = memory

    @property
    def memory(self) -> Tensor:
        """The memory of the kernel's own; made when it is first asked for."""
        if isinstance(self._memory, Room):
            self._memory = self._memory.make()
        return self._memory

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that it follows from."""
        return (self.name,)

    @property
    def tensor(self) -> Tensor:
        """What the kernel reads in this pass."""
        return self.ordered() if self.is_in_place() else self.memory

    def ordered(self) -> Tensor:
        return self.order(self._values[self.name])

    def is_in_place(self) -> bool:
        """Whether the value has the form that the kernel reads."""
        if not self._in_place or self.is_derived or self.name not in self._values:
            return False
        found = self.ordered()
        if not self.may_read(found) or not is_view(found, self._values[self.name]):
            return False
        return found.is_contiguous() and not found.data_ptr() % self._alignment_bytes

    def may_read(self, found: Tensor) -> bool:
        """Whether the kernel knows this dtype and shape."""
        return found.dtype == self._memory.dtype and found.shape == self._memory.shape

    @property
    def by_torch(self) -> bool:
        """Whether only `fill` can make it."""
        return False

    def fill(self) -> None:
        """Fills the memory by torch."""
        self.memory.copy_(self.ordered())


def conv_weight(step: Step, name: str, frame: Frame) -> Constant:
    """A convolution's weight as (O, R, S, C)."""
    type_ = step.types[name]
    o, c, r, s = type_.shape
    room = Room((o, r, s, c), type_.torch_dtype, frame.device)
    return Constant(frame.values, name, room, by_pixels, in_place=True)


def in_rows(step: Step, name: str, frame: Frame) -> Constant:
    """A constant of any shape, its last axis the innermost."""
    type_ = step.types[name]
    room = Room(type_.shape, type_.torch_dtype, frame.device)
    return Constant(frame.values, name, room, as_it_is, in_place=True)


def floats(name: str, count: int, frame: Frame) -> Constant:
    """A float32 number of each channel."""
    return Constant(frame.values, name, Room((count,), torch.float32, frame.device))


class Parameter(ctypes.Structure):
    """plantune::Parameter."""

    _fields_ = (("from_", ctypes.c_void_p), ("stride", ctypes.c_int), ("is_float", ctypes.c_int))


class ChannelValues(Constant):
    """A number of each channel, or one for all: as the parameter has it, or in float32."""

    def __init__(self, step: Step, name: str, count: int, frame: Frame) -> None:
        room = Room((count,), torch.float32, frame.device)
        super().__init__(frame.values, name, room, in_place=True, alignment_bytes=1)
        self._count = count
        self._dtypes = (step.types[name].torch_dtype, torch.float32)

    def may_read(self, found: Tensor) -> bool:
        return found.dtype in self._dtypes and found.numel() in (1, self._count)

    def parameter(self) -> Parameter:
        """Where a kernel finds it in this pass."""
        found = self.tensor
        is_float = found.dtype == torch.float32
        return Parameter(found.data_ptr(), 0 if found.numel() == 1 else 1, is_float)


def is_view(tensor: Tensor, source: Tensor) -> bool:
    """Whether it shares the source's memory: a copy would be out of date in the next pass."""
    return tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
