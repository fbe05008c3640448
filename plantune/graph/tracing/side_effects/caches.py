"""What a forward keeps of a trace in caches of its own, such as a table of positions by its length.

The user's own calls would find it there, and its tensors have no memory.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from sys import getrefcount
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from plantune.graph.tracing.records import Record


class Caches:
    """`empty()` removes constants that were made in `following()` from dicts, lru_caches and
    globals, as if that code had not run. What the code returned, `made`, keeps them.
    """

    def __init__(self) -> None:
        self.made: Any = None
        self._records: list[Record] = []
        # As the code has them, which may be other objects than those of the records.
        self._constants: list[Tensor] = []

    def following(self, records: list[Record]) -> TorchFunctionMode:
        self._records = records
        return _Constants(self._constants)

    def empty(self) -> None:
        given = [(r.args, dict(r.kwargs), r.result) for r in self._records if self._constants]
        # Of one that has views there are more references than can be seen.
        held = _held_beside(self._constants, Counter(map(id, _tensors((given, self.made)))))
        if held:
            own = {id(self._constants), id(held)}
            _take(held, own.union(map(id, _containers([*self._records, self.made]))))


def _held_beside(objects: list[Any], known: Mapping[int, int]) -> list[Any]:
    """The objects that something else refers to, besides the list and the `known` references.

    The count of an object that nothing else holds says how many references counting itself adds:
    from Python 3.14 on a loop or a call may borrow one.
    """
    (alone,) = _counts([object()])
    counted = zip(objects, _counts(objects), strict=True)
    return [each for each, count in counted if count > alone + known[id(each)]]


def _counts(objects: list[Any]) -> list[int]:
    return [getrefcount(each) for each in objects]


class _Constants(TorchFunctionMode):
    """Lists what is made of no tensor but others in the list."""

    def __init__(self, found: list[Tensor]) -> None:
        super().__init__()
        self._found, self._known = found, set[int]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        first = args[0] if args else None
        if isinstance(first, Tensor) and id(first) not in self._known:
            return result  # as nearly all do
        if all(id(given) in self._known for given in _tensors((args, kwargs))):
            new = [tensor for tensor in _tensors(result) if id(tensor) not in self._known]
            self._found += new
            self._known.update(map(id, new))
        return result


def _take(held: list[Any], own: set[int], *, within_tuples: bool = True) -> None:
    """Removes them from everything that refers to them, except from `own`."""
    taken, tuples = {*map(id, held)}, []
    namespaces = {id(vars(module)) for module in [*sys.modules.values()]}
    for holder in gc.get_referrers(*held):
        if id(holder) in own:
            continue
        if isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()
        elif isinstance(holder, dict):
            for key in [key for key, value in holder.items() if id(value) in taken]:
                if id(holder) in namespaces:
                    holder[key] = None  # as a global is that is made in the first call
                else:
                    del holder[key]
        elif type(holder) is tuple:
            tuples.append(holder)
    if tuples and within_tuples:
        _take(tuples, {*own, id(tuples), id(held)}, within_tuples=False)


def _containers(value: Any) -> Iterator[Any]:
    """Those that a trace is made of."""
    if isinstance(value, Record):
        yield from (value, vars(value))
        yield from _containers([value.args, value.kwargs, value.result])
    elif isinstance(value, (tuple, list, dict)):
        yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from _containers(part)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
