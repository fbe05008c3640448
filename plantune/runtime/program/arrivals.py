"""Tells of gradients as a backward pass makes them, so that other work on them may begin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from plantune.runtime.program.branches import Branch, Enqueue
from plantune.runtime.program.schedule import ScheduledStep

Report = Callable[[Sequence[str]], None]


class Arrivals:
    """The moments of a pass after which values stay as they are: what is enqueued on the current
    stream then finds them.
    """

    def __init__(self, places: Mapping[str, int]) -> None:
        """`places` are those of the launches before which each value is there."""
        self._report: Report | None = None
        self.calls: dict[int, Enqueue] = {}
        for place in {*places.values()}:
            names = tuple(name for name, its in places.items() if its == place)
            self.calls[place] = partial(self._arrive, names)

    def _arrive(self, names: Sequence[str]) -> None:
        if self._report is not None:
            self._report(names)

    @contextmanager
    def reporting_to(self, report: Report | None) -> Iterator[None]:
        self._report = report
        try:
            yield
        finally:
            self._report = None


def arrival_places(
    launches: Sequence[ScheduledStep], branches: Iterable[Branch], values: Iterable[str], first: int
) -> dict[str, int]:
    """The place of the launch before which each value is made; `first` if no launch makes it."""
    beside = {(branch.launch, branch.rest): branch.join for branch in branches}
    found = dict.fromkeys(values, first)
    for place, launch in enumerate(launches):
        for name in found.keys() & launch.writes:
            rest = name in launch.rest and beside.get((place, True))
            found[name] = max(first, rest or beside.get((place, False), place + 1))
    return found
