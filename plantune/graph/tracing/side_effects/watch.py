"""Watches one forward for what it does beside what it returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from plantune.graph.tracing.records import Record
from plantune.graph.tracing.side_effects.caches import Caches
from plantune.graph.tracing.side_effects.generators import generators, unset
from plantune.graph.tracing.side_effects.objects import held_objects

LEAST_S = 0.01


class SideEffects:
    """Enter it before the trace, and leave it once all of the trace's frames are gone.

    `refuse` makes the error of a forward that moves what a plan cannot move.
    """

    def __init__(self, module: nn.Module, refuse: Callable[[str], Exception]) -> None:
        self._module, self._refuse, self._caches = module, refuse, Caches()

    def __enter__(self) -> SideEffects:
        return self

    def __exit__(self, *error: object) -> None:
        self._caches.empty()

    def made(self, value: Any) -> Any:
        """What the forward returned, which stays as it is."""
        self._caches.made = value
        return value

    @contextmanager
    def watched(self, records: list[Record]) -> Iterator[None]:
        """The forward runs inside. Raises if it drew from Python's random numbers or numpy's, such
        as to leave out a layer, or sets where torch's go on, or moved what the module holds, which
        is put back.

        Other threads draw from the same generators. Whether one is at it is seen while this one
        waits: then it is not known who drew, and nothing is raised.
        """
        objects, began_s = [*generators(), *held_objects(self._module)], time.perf_counter()
        with unset(self._refuse), self._caches.following(records):
            yield
        seconds = time.perf_counter() - began_s
        for each in objects:
            if each.has_moved and _stands(each.look, seconds):
                each.restore()
                raise self._refuse(
                    f"a forward that {'draws from' if each.draws else 'changes'} {each.path}"
                )


def _stands(look: Callable[[], Any], seconds: float) -> bool:
    """Whether no other thread changes it in that time."""
    if threading.active_count() == 1:
        return True
    state = look()
    time.sleep(max(seconds, LEAST_S))
    return bool(look() == state)
