"""Watches a module's parameters and buffers, so that the next call uses them as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from gc import get_referents
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from plantune.graph.layouts import HOST_MEMORY
from plantune.runtime.watched import epoch

_version = attrgetter("_version")
# Private, but what torch's own compiled graphs use; builds for the CPU alone lack it.
_all_at = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


class Watched:
    """Some dicts, as they were when this was made.

    A look costs nothing in Python 3.12 and later, elsewhere 7 ns an entry (2026-11-22). There, a
    value that equals the one in its place before is taken for it, unless these are `tensors`.
    """

    def __init__(self, dicts: list[dict[str, Any]], *, tensors: bool = False) -> None:
        self._dicts = dicts
        # Whether `epoch.count` moves with each change of them.
        self.is_counted = epoch.watch(dicts)
        self._by_identity = tensors or self.is_counted
        # What `epoch.count` was: as long as it is that, `changed` need not be asked.
        self.seen = epoch.count if self.is_counted else -1
        self._entries = get_referents(*dicts)

    def changed(self) -> bool:
        if self.seen == epoch.count:
            return False
        count, now = epoch.count, get_referents(*self._dicts)
        if self._differ(now):
            return True
        if self.is_counted:  # others changed
            self.seen = count
        return False

    def _differ(self, now: list[Any]) -> bool:
        if self._by_identity:
            return len(now) != len(self._entries) or not all(map(is_, now, self._entries))
        try:
            return now != self._entries
        except Exception:  # What compares may be anybody's.
            return True


def contents_differ(containers: Iterable[Iterable[Any]], contents: list[Any]) -> bool:
    """Whether these containers have others than those objects, one after the other."""
    try:
        now = [*chain.from_iterable(containers)]
    except RuntimeError:  # Another thread is changing one.
        return True
    return len(now) != len(contents) or not all(map(is_, now, contents))


class Snapshot:
    """All parameters and buffers of a module, and where they are."""

    def __init__(self, module: nn.Module) -> None:
        modules = [*module.modules()]
        kept = [owned for m in modules for owned in (m._parameters, m._buffers)]
        self.watched = Watched([*kept, *(m._modules for m in modules)], tensors=True)
        # Those that are not None.
        self.tensors = [t for owned in kept for t in owned.values() if t is not None]
        self._pointers = [*map(Tensor.data_ptr, self.tensors)]
        # Whether these tensors are where they were.
        self.in_place = _in_place(self.tensors, self._pointers)

    def is_current(self) -> bool:
        watched = self.watched
        if watched.seen != epoch.count and watched.changed():
            return False
        return self.in_place()

    def equals(self, other: Snapshot) -> bool:
        """Whether the same tensors are in the same places."""
        same = self._pointers == other._pointers
        return same and all(map(is_, self.tensors, other.tensors))


def _in_place(tensors: list[Tensor], pointers: list[int]) -> Callable[[], bool]:
    if _all_at is not None:
        return partial(_all_at, tensors, pointers, [*range(len(tensors))])
    data_ptr = Tensor.data_ptr
    return lambda: [*map(data_ptr, tensors)] == pointers


class OwnedTensors:
    """All parameters and buffers that a module owns, as they were at the last look."""

    def __init__(self, module: nn.Module, otherwise: torch.device = HOST_MEMORY) -> None:
        self.module = module
        # Where it runs if there is none.
        self.otherwise = otherwise
        # Incremented when a look finds that a tensor was replaced or moved.
        self.moves = 0
        # Bumped by refresh(): the user says that weights were written without a trace.
        self.writes = 0
        self._lock = threading.Lock()
        # As the last look found them; another one after each look that found anything changed.
        self.snapshot = Snapshot(module)

    @property
    def present(self) -> list[Tensor]:
        return self.snapshot.tensors

    def look(self) -> None:
        """Moves `moves` if there are other tensors than at the last look, or in other memory."""
        if self.snapshot.is_current():
            return
        with self._lock:
            now = Snapshot(self.module)
            if not now.equals(self.snapshot):
                self.moves += 1
            # Last: who finds this one current must find that number too.
            self.snapshot = now

    def forget(self) -> None:
        """Has everything read again that was derived from the tensors."""
        self.writes += 1
        self.moves += 1


class LiveState:
    """Some of a module's tensors, by name, and whether they changed.

    A change is seen by identity, address and version. `tensor.data` has a version of its own, and
    inference tensors have none: each step of any optimizer counts as a change, since many write
    that way. Memory that is shared with other processes may have been written at any time. Other
    such writes are seen after `refresh()`.
    """

    def __init__(self, owned: OwnedTensors, names: Iterable[str]) -> None:
        self._owned = owned
        self._names = tuple(names)
        self._moves = -1
        self._kept: dict[str, Tensor] = {}  # no other tensor gets the id of one of these
        self._where: list[tuple[int, int]] = []
        self._seen: tuple[object, ...] = ()
        self._is_shared = False

    def tensors(self) -> dict[str, Tensor]:
        """Name and tensor, as the last look found them."""
        if self._moves != self._owned.moves:
            self._moves = self._owned.moves
            found = ((name, _tensor(self._owned.module, name)) for name in self._names)
            self._kept = {name: tensor for name, tensor in found if tensor is not None}
            self._where = [(id(tensor), tensor.data_ptr()) for tensor in self._kept.values()]
            self._is_shared = any(map(_is_shared, self._kept.values()))
        return self._kept

    def versions(self) -> tuple[object, ...]:
        """What is another one if a tensor was replaced or moved, by the last look, or written."""
        tensors = self.tensors()
        return self._where, _versions(tensors.values())

    def changed(self) -> bool:
        """Whether the last look found anything that this had not seen before."""
        now = (*self.versions(), _Steps.taken, self._owned.writes)
        changed = now != self._seen
        self._seen = now
        return changed or self._is_shared


def counters_of(names: Iterable[str]) -> dict[str, None]:
    """What torch's batch norms count their batches in, where one of these is a statistic of theirs:
    a pass in training moves those by a function that leaves no trace in their versions.
    """
    parts = (name.rpartition(".") for name in names)
    paths = [f"{path}{dot}" for path, dot, key in parts if key in ("running_mean", "running_var")]
    return dict.fromkeys(f"{path}num_batches_tracked" for path in paths)


class _Steps:
    """How many steps optimizers took in this process."""

    taken = 0


def count_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    _Steps.taken += 1


register_optimizer_step_post_hook(count_step)


def _versions(tensors: Collection[Tensor]) -> list[int]:
    try:
        return [*map(_version, tensors)]
    except RuntimeError:  # Of an inference tensor torch keeps no version.
        return [0 if t.is_inference() else t._version for t in tensors]


def _is_shared(tensor: Tensor) -> bool:
    """Whether another process may write to it; of a GPU's memory torch always says so."""
    return tensor.is_cpu and tensor.layout == torch.strided and tensor.is_shared()


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer of that name; None if there is none any more."""
    path, _, key = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return None
    found = owner._parameters.get(key)
    return owner._buffers.get(key) if found is None else found
