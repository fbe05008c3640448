"""Watches a module's parameters and buffers, so that the next call sees every change of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from operator import attrgetter, getitem, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

CPU = torch.device("cpu")
SAMPLES_PER_TENSOR = 6
_version = attrgetter("_version")
WORDS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}


class HeldTensors:
    """All parameters and buffers of a module, as they were when somebody last looked.

    A look is taken in every call, so it handles whole lists at a time, and only here: 10 us
    for se_resnet9_fixup (2026-11-20).
    """

    def __init__(self, module: nn.Module, otherwise: torch.device = CPU) -> None:
        self.module = module
        # Where it runs if there is none.
        self.otherwise = otherwise
        # Another number after each look that found another tensor, or memory that lies elsewhere.
        self.moves = 0
        # Counts what the user told of writes that leave no trace.
        self.writes = 0
        self._take()

    def in_place(self) -> bool:
        """Whether the memory of those that the last look found is where it was."""
        return [*map(Tensor.data_ptr, self.present)] == self._pointers

    def look(self) -> bool:
        """Whether all are the same tensors as before, in the same memory."""
        try:
            now = [*map(getitem, *self._places)]
        except KeyError:
            return self._moved()
        if not all(map(is_, now, self._tensors)) or [*map(len, self._held)] != self._sizes:
            return self._moved()
        if not self.in_place():
            return self._moved()
        self.versions = _versions(self.present)
        return True

    def _moved(self) -> bool:
        # Before and behind: who looks meanwhile, in another thread, must look again.
        self.moves += 1
        self._take()
        self.moves += 1
        return False

    def _take(self) -> None:
        modules = self.module.modules()
        self._held = [held for m in modules for held in (m._parameters, m._buffers) if held]
        self._sizes = [*map(len, self._held)]
        places = [(held, key) for held in self._held for key in held]
        self._places = [held for held, _ in places], [key for _, key in places]
        self._tensors = [held[key] for held, key in places]
        there = [place for place in places if place[0][place[1]] is not None]
        self._order = {(id(held), key): index for index, (held, key) in enumerate(there)}
        # Those that are not None.
        self.present = [tensor for tensor in self._tensors if tensor is not None]
        self._pointers = [*map(Tensor.data_ptr, self.present)]
        self.versions = _versions(self.present)

    def order(self, places: Iterable[tuple[dict[str, Tensor], str]]) -> list[int]:
        """Where tensors are among those present, by the dicts and keys under which they are kept;
        -1 for one that is not there any more.
        """
        return [self._order.get((id(held), key), -1) for held, key in places]


class LiveState:
    """The tensors of some names among those that a module holds, and whether they changed.

    A change is seen by identity, address and version. `tensor.data` has a version of its own, and
    inference tensors have none, so writing there leaves no trace. To see it all the same, each step
    of any optimizer counts as a change, and of tensors on the CPU a few elements are compared.
    """

    def __init__(self, held: HeldTensors, names: Iterable[str]) -> None:
        self._held = held
        self._places = [_place(held.module, name) for name in names]
        self._moves = -1
        self._kept: list[Tensor] = []  # no other tensor gets the id of one of these
        self._where: list[tuple[int, int]] = []
        self._pick: Callable[[list[int]], object] = tuple
        self._seen: tuple[object, ...] = ()
        self._samples: list[Any] = []
        self._last: list[int] = []

    def tensors(self) -> dict[str, Tensor]:
        """Name and tensor, as they are now."""
        return {name: owner[key] for name, owner, key in self._places}

    def versions(self) -> tuple[object, ...]:
        """What is another one, by the last look, if a tensor was replaced, moved or written."""
        if self._moves != self._held.moves:
            self._moves = self._held.moves
            order = self._held.order((owner, key) for _, owner, key in self._places)
            self._pick = itemgetter(*order) if order else tuple
            self._kept = [self._held.present[place] for place in order]
            self._where = [(id(tensor), tensor.data_ptr()) for tensor in self._kept]
        return self._where, self._pick(self._held.versions)

    def changed(self) -> bool:
        """Whether the last look found anything that this had not seen before."""
        now = (*self.versions(), _Steps.taken, self._held.writes)
        if now != self._seen:
            self._seen = now
            self._samples = [word for t in self.tensors().values() for word in _samples(t)]
            self._last = [word.value for word in self._samples]
            return True
        drawn = [word.value for word in self._samples]
        if drawn == self._last:
            return False
        self._last = drawn
        return True


class _Steps:
    """How many steps optimizers took in this process: many of them write through `tensor.data`."""

    taken = 0


def _count_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    _Steps.taken += 1


register_optimizer_step_post_hook(_count_step)


def _versions(tensors: list[Tensor]) -> list[int]:
    try:
        return [*map(_version, tensors)]
    except RuntimeError:  # Of an inference tensor torch keeps no version.
        return [0 if t.is_inference() else t._version for t in tensors]


def _place(module: nn.Module, name: str) -> tuple[str, dict[str, Tensor], str]:
    """Where a tensor of that name is kept: the owning module's dict and the key in it."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    holder = owner._parameters if key in owner._parameters else owner._buffers
    return name, holder, key  # type: ignore[return-value]


def _samples(tensor: Tensor) -> list[Any]:
    """Up to SAMPLES_PER_TENSOR elements, the first and the last among them, as they lie in memory.

    As integers, so that NaN equals itself. They are read only after the address was seen to be
    the same, and not by torch: 10 us a call instead of 39 (se_resnet9_fixup, 2026-11-20).
    """
    if not tensor.numel() or tensor.device.type != "cpu" or not tensor.data_ptr():
        return []
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    # Not numel: an expanded tensor has less memory.
    last = sum((size - 1) * stride for size, stride in axes)
    count = min(last + 1, SAMPLES_PER_TENSOR)
    places = {last * i // max(count - 1, 1) for i in range(count)}
    size = tensor.dtype.itemsize
    return [WORDS[size].from_address(tensor.data_ptr() + place * size) for place in sorted(places)]
