"""Constants of a step in the order and dtype in which its kernel reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from plantune.graph import Step, TensorType

if TYPE_CHECKING:
    from plantune.kernels.family import Frame

ALIGNMENT_BYTES = 16  # of what a kernel reads in place
S = TypeVar("S", bound=ctypes.Structure)
Order = Callable[[Tensor], Tensor]


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def flat(tensor: Tensor) -> Tensor:
    """The elements in a row."""
    return tensor.reshape(-1)


def by_pixels(weight: Tensor) -> Tensor:
    """A convolution's weight as (O, R, S, C): in channels_last memory it has this arrangement, and
    so has the weight of a linear layer.
    """
    return weight.permute(0, 2, 3, 1) if weight.dim() == 4 else weight[:, None, None, :]


@dataclass(frozen=True)
class Room:
    """Memory to be made when it is first needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Parameter(ctypes.Structure):
    """plantune::Parameter."""

    _fields_ = (("from_", ctypes.c_void_p), ("stride", ctypes.c_int), ("is_float", ctypes.c_int))


class Constant:
    """The value `name` as a kernel reads it.

    It is read in place if that is allowed and it is arranged so already. Otherwise each pass fills
    memory of the kernel's own with it: `order` views the value such that its elements come as in
    that memory, to which they are broadcast and cast. One that `packs` may also copy and pad with
    zeros, whatever dtype it is given. One that is read by `parameter` may also be of the dtype
    `also`, one number for all, and off the alignment.
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
        also: torch.dtype | None = None,
    ) -> None:
        self.name = name
        self.order = order
        self.packs = packs
        self._values = values
        self._in_place = in_place
        self._also = also
        # Whether the pass computes the value itself, so that it has no address before.
        self.is_derived = False
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
        """Whether the value has the arrangement that the kernel reads."""
        if not self._in_place or self.is_derived or self.name not in self._values:
            return False
        found = self.ordered()
        if not self._may_read(found) or not is_view(found, self._values[self.name]):
            return False
        aligned = self._also is not None or not found.data_ptr() % ALIGNMENT_BYTES
        return found.is_contiguous() and aligned

    def _may_read(self, found: Tensor) -> bool:
        """Whether the kernel knows this dtype and shape."""
        one = self._also is not None and found.numel() == 1
        known = found.dtype in (self._memory.dtype, self._also)
        return known and (one or found.shape == self._memory.shape)

    @property
    def by_torch(self) -> bool:
        """Whether only `fill` can make it."""
        return False

    def fill(self) -> None:
        """Fills the memory by torch."""
        self.put(self.ordered())

    def put(self, ordered: Tensor) -> None:
        """Fills the memory by torch with a value in the kernel's order."""
        self.memory.copy_(ordered)

    def parameter(self) -> Parameter:
        """Where a kernel finds a number of each channel, or the one for all, in this pass."""
        found = self.tensor
        is_float = found.dtype == torch.float32
        return Parameter(found.data_ptr(), 0 if found.numel() == 1 else 1, is_float)


class PlanesConstant(Constant):
    """A float32 value as planes of bfloat16, whose sum it is; they come one after the other. The
    first has what a float has in its upper half, the last one alone what is not finite: see
    `csrc/cuda/planes.h`.
    """

    def put(self, ordered: Tensor) -> None:
        rest, last = ordered.float(), len(self.memory) - 1
        finite = rest.isfinite()
        for number, plane in enumerate(self.memory):
            cut = (rest.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)
            plane.copy_(rest if number else cut)
            if number < last:
                plane.masked_fill_(~finite, 0.0)
            rest = rest - plane.float()


@dataclass(frozen=True)
class Arrangement:
    """What makes a value a `Constant` of some kernel. Its memory has `rows` at least, which are
    zeros after those of `shape`; or it is so many `planes` of that shape.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: Order = flat
    packs: bool = False
    in_place: bool = False
    also: torch.dtype | None = None
    rows: int = 0
    planes: int = 0

    def of(self, name: str, frame: Frame) -> Constant:
        """The value `name` in this arrangement."""
        if self.planes:
            room = Room((self.planes, *self.shape), self.dtype, frame.device)
            return PlanesConstant(frame.values, name, room, self.order, packs=self.packs)
        memory: Tensor | Room = Room(self.shape, self.dtype, frame.device)
        if self.rows and self.rows > self.shape[0]:
            whole = (self.rows, *self.shape[1:])
            zeros = torch.zeros(whole, dtype=self.dtype, device=frame.device)
            memory = zeros[: self.shape[0]]
        how = {"packs": self.packs, "in_place": self.in_place}
        return Constant(frame.values, name, memory, self.order, also=self.also, **how)


def conv_weight(type_: TensorType, rows: int = 0) -> Arrangement:
    """A convolution's weight as (O, R, S, C)."""
    o, c, r, s = type_.shape
    dtype, in_place = type_.torch_dtype, rows <= o
    return Arrangement((o, r, s, c), dtype, by_pixels, in_place=in_place, rows=rows)


def in_rows(type_: TensorType) -> Arrangement:
    """A constant of any shape, its last axis the innermost."""
    return Arrangement(type_.shape, type_.torch_dtype, as_it_is, in_place=True)


def floats(count: int, rows: int = 0) -> Arrangement:
    """A float32 number of each channel."""
    return Arrangement((count,), torch.float32, rows=rows)


def channel_values(type_: TensorType, count: int) -> Arrangement:
    """A number of each channel, or one for all: as the parameter has it, or in float32."""
    return Arrangement((count,), torch.float32, in_place=True, also=type_.torch_dtype)


class Constants:
    """What a kernel reads of weights, by the kernel's own words; what is None is not there."""

    def __init__(self, frame: Frame, read: Mapping[str, tuple[str | None, Arrangement]]) -> None:
        self._values = frame.values
        self._made = {
            word: how.of(name, frame) for word, (name, how) in read.items() if name is not None
        }

    def __contains__(self, word: str) -> bool:
        return word in self._made

    @property
    def all(self) -> tuple[Constant, ...]:
        return tuple(self._made.values())

    def tensor(self, word: str) -> Tensor:
        """What the kernel reads in this pass; values of other names are as they are."""
        return self._made[word].tensor if word in self._made else self._values[word]

    def tensors(self) -> dict[str, Tensor]:
        return {word: constant.tensor for word, constant in self._made.items()}

    def into(self, kind: type[S], named: Mapping[str, str | None], /, **others: Any) -> S:
        """A kernel's struct with where it finds each in this pass, and the values that are `named`;
        words that no member has are left out.
        """
        values = self._values
        found: dict[str, Any] = {
            word: values[name].data_ptr() for word, name in named.items() if name is not None
        }
        for each in kind.__mro__:
            for word, type_ in getattr(each, "_fields_", ()):
                if made := self._made.get(word):
                    own = type_ is Parameter
                    found[word] = made.parameter() if own else made.tensor.data_ptr()
        return kind(**found, **others)


def rows_of(step: Step, frame: Frame) -> Constants:
    """All constants of a step in rows, by their names."""
    return Constants(frame, {name: (name, in_rows(step.types[name])) for name in step.constants})


def is_view(tensor: Tensor, source: Tensor) -> bool:
    """Whether it shares the source's memory: a copy would be out of date in the next pass."""
    return tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
