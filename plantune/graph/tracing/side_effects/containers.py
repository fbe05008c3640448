"""What a forward remembers in dicts of its own, as caches of what follows from weights and shapes.

A trace runs with copies of a module's containers, so nothing of it stays in the module. A dict may
gain tensors that depend on no input: any later call would find or make the same ones. What earlier
calls have remembered is left out, and its like must come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from plantune.graph.tracing.records import Record


class Containers:
    """The dicts, lists and sets among attributes, as copies that a trace may write to."""

    def __init__(self) -> None:
        # By the identity of what was copied, which this keeps alive.
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._left_out: dict[int, dict[Any, Tensor]] = {}
        self._before: dict[int, Any] = {}

    def copied(self, value: Any) -> Any:
        """The copy that stands for a container, with copies of those in it; else the value."""
        if type(value) not in (dict, list, set):
            return value
        if id(value) not in self._copies:
            copy = type(value)()
            self._copies[id(value)] = (value, copy)
            if isinstance(value, dict):
                known = {k: v for k, v in value.items() if isinstance(v, Tensor)}
                self._left_out[id(copy)] = known
                copy.update((k, self.copied(v)) for k, v in value.items() if k not in known)
            elif isinstance(value, list):
                copy.extend(map(self.copied, value))
            else:
                copy.update(value)
            self._before[id(copy)] = type(copy)(copy)
        return self._copies[id(value)][1]

    def remembered(self) -> list[Tensor] | None:
        """The tensors that dicts have gained; None if containers changed in another way."""
        found: list[Tensor] = []
        for _, copy in self._copies.values():
            before = self._before[id(copy)]
            gained = _gained(copy, before) if isinstance(copy, dict) else {}
            changed = not isinstance(copy, dict) and not _same(copy, before)
            if gained is None or changed or not _are_back(self._left_out.get(id(copy), {}), gained):
                return None
            found.extend(gained.values())
        return found


def _gained(now: dict[Any, Any], before: dict[Any, Any]) -> dict[Any, Tensor] | None:
    new = {key: value for key, value in now.items() if key not in before}
    stayed = all(now.get(key) is value for key, value in before.items())
    return new if stayed and all(isinstance(value, Tensor) for value in new.values()) else None


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, set):
        return bool(now == before)
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _are_back(left_out: dict[Any, Tensor], gained: dict[Any, Tensor]) -> bool:
    """Under whatever key: it may name the device."""
    made = {(tensor.shape, tensor.dtype) for tensor in gained.values()}
    return all((tensor.shape, tensor.dtype) in made for tensor in left_out.values())


def depend(tensors: Iterable[Tensor], records: Sequence[Record], on: Iterable[Tensor]) -> bool:
    """Whether any of the tensors follows from these inputs or from random numbers."""
    wanted = set(map(_storage, tensors))
    inputs = set(map(_storage, on))
    for record in reversed(records):
        given = [leaf for leaf in tree_leaves((record.args, dict(record.kwargs))) if _is(leaf)]
        made = [leaf for leaf in tree_leaves(record.result) if _is(leaf)]
        if wanted.isdisjoint(map(_storage, made)):
            continue
        if torch.Tag.nondeterministic_seeded in record.overload.tags:
            return True
        wanted.update(map(_storage, given))
    return not wanted.isdisjoint(inputs)


def _is(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
