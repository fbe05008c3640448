"""Objects that a module holds and its forward may move: generators, queues, arrays, counters.

A trace would keep for all calls what it found in them.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

# A container of more elements, such as a vocabulary, or a larger array is not looked at.
MOST_ELEMENTS = 1000
CONTAINERS = (tuple, list, dict, set, frozenset)
OF_TORCH = frozenset(vars(nn.Module()))
# How its state is read, and what puts that back; None of an object that is not known.
Access = tuple[Callable[[], Any], Callable[[Any], object]] | None


@dataclass(frozen=True)
class HeldObject:
    """What an attribute holds, and its state when this was made. To look gives an equal one as long
    as nothing moved it.
    """

    path: str
    draws: bool
    look: Callable[[], Any]
    put_back: Callable[[Any], object]
    before: Any

    @property
    def has_moved(self) -> bool:
        return bool(self.look() != self.before)

    def restore(self) -> None:
        self.put_back(self.before)


def held_objects(module: nn.Module) -> list[HeldObject]:
    """What the module and its submodules hold besides tensors, modules and plain values."""
    found = []
    for path, value in _values(module):
        generator = _generator(value)
        access = generator or _sequence(value) or _counter(value)
        if access is not None:
            look, put_back = access
            found.append(HeldObject(path, generator is not None, look, put_back, look()))
    return found


def _values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, child in module.named_modules():
        for key, value in vars(child).items():
            if key not in OF_TORCH:
                yield from _inside(f"self.{path}.{key}" if path else f"self.{key}", value, ())


def _inside(path: str, value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """The value, or what is in it if it is a container."""
    if not isinstance(value, CONTAINERS):
        yield path, value
    elif len(value) <= MOST_ELEMENTS and id(value) not in above:
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _inside(path, inner, (*above, id(value)))


def _generator(value: Any) -> Access:
    """Of random numbers: Python's, or numpy's if that was loaded, else nobody holds one."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(value, numpy.RandomState):
        return lambda: _Bytes(value.get_state(legacy=False)), lambda b: value.set_state(b.state)
    if numpy is not None and isinstance(value, numpy.Generator):
        inner = value.bit_generator
        return lambda: _Bytes(inner.state), lambda before: setattr(inner, "state", before.state)
    return None


def _sequence(value: Any) -> Access:
    if isinstance(value, itertools.count):  # which nothing puts back
        return lambda: repr(value), lambda before: None
    if isinstance(value, deque):
        return lambda: [*map(_Same, value)], lambda before: _refill(value, before)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.hasobject:
        return None
    if value.size > MOST_ELEMENTS:
        return None
    return lambda: _Bytes(value.copy()), lambda before: numpy.copyto(value, before.state)


def _counter(value: Any) -> Access:
    """The numbers in an object of anybody's class. What else it keeps may be caches."""
    own = getattr(value, "__dict__", None)
    if type(own) is not dict or isinstance(value, (type, nn.Module)):
        return None
    numbers = [key for key, held in own.items() if type(held) in (bool, int, float)]
    return (lambda: {key: own.get(key) for key in numbers}, own.update) if numbers else None


class _Bytes:
    """State with arrays in it, which are equal if their bytes are."""

    def __init__(self, state: Any) -> None:
        self.state, self._plain = state, plain(state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bytes) and bool(other._plain == self._plain)

    __hash__ = None  # type: ignore[assignment]


def plain(part: Any) -> Any:
    """State that can be compared: arrays as their bytes."""
    if isinstance(part, dict):
        return {key: plain(value) for key, value in part.items()}
    return part.tobytes() if hasattr(part, "tobytes") else part


class _Same:
    """An element of a queue, which is what it was if it is that object."""

    def __init__(self, element: Any) -> None:
        self.element = element

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.element is self.element

    __hash__ = None  # type: ignore[assignment]


def _refill(queue: deque[Any], before: list[_Same]) -> None:
    queue.clear()
    queue.extend(same.element for same in before)
