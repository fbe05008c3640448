"""Which launches run beside others, as nothing waits for them at once, and on which streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from plantune.runtime.program.schedule import Schedule, ScheduledStep
from plantune.runtime.program.streams import Side

# Memory of a branch is taken for as long as it may run: it starts no more launches before its turn,
# and ends no more after it.
REACH = 4

Edges = tuple[frozenset[str], frozenset[str]]  # the values that a launch reads and writes


@dataclass(frozen=True)
class Branch:
    """A launch beside those between `fork`, after which it starts, and `join`, which waits for it.

    All three are places among the launches of forward and backward. A branch that waits for nothing
    of its pass forks before the first launch, one that nothing of it reads joins after the last.
    With `rest` it is the second half of a launch that itself stays in line, and forks after it.
    """

    launch: int
    fork: int
    join: int
    rest: bool = False

    @property
    def beside(self) -> range:
        """The places of the launches while which it may run, its own among them."""
        return range(self.fork + (not self.rest), self.join)


def branches_of(schedule: Schedule) -> tuple[Branch, ...]:
    """The launches and halves of launches that can run beside the others of their pass, in order.

    A branch has other work beside it on the main line, and neither reads nor feeds another branch.
    """
    found: list[Branch] = []
    start = 0
    for phase in ("forward", "backward"):
        launches = schedule.phase(phase)
        found += _branches(launches, start)
        start += len(launches)
    return tuple(found)


def _branches(launches: Sequence[ScheduledStep], start: int) -> list[Branch]:
    """Those of one pass. Where two could run beside each other, the smaller one leaves the line."""
    edges = [(launch.reads, launch.writes) for launch in launches]
    spans = [_span(edges, place) for place in range(len(launches))]
    line = {place for place, launch in enumerate(launches) if not launch.aliases}
    free = [place for place in sorted(line) if not launches[place].adopts]
    taken: set[int] = set()

    def others(place: int) -> int:
        return len((line & {*spans[place].beside}) - taken - {place})

    for place in sorted(free, key=lambda p: (-others(p), launches[p].step.flops)):
        if others(place) and not any(_touch(edges, place, branch) for branch in taken):
            taken.add(place)
    found = [spans[place] for place in taken]
    for place in line - taken:
        touched = launches[place].rest
        made = touched & edges[place][1]
        if touched and not any(made & edges[branch][0] for branch in taken):
            found.append(_rest(edges, place, made))
    return [
        replace(b, launch=start + b.launch, fork=start + b.fork, join=start + b.join)
        for b in sorted(found, key=lambda branch: branch.launch)
        if not b.rest or b.join > b.launch + 1
    ]


def _rest(edges: Sequence[Edges], place: int, made: frozenset[str]) -> Branch:
    """The second half of a launch, up to the first one that reads what it has made."""
    join = min(len(edges), place + 1 + REACH)
    readers = (p for p in range(place + 1, join) if made & edges[p][0])
    return Branch(place, place, next(readers, join), rest=True)


def _span(edges: Sequence[Edges], place: int) -> Branch:
    """From the last launch that it reads of to the first one that reads of it."""
    reads, writes = edges[place]
    fork, join = max(-1, place - 1 - REACH), min(len(edges), place + 1 + REACH)
    before = (p for p in range(fork + 1, place) if reads & edges[p][1])
    readers = (p for p in range(place + 1, join) if writes & edges[p][0])
    return Branch(place, max(before, default=fork), next(readers, join))


def _touch(edges: Sequence[Edges], one: int, other: int) -> bool:
    """Whether one of them reads what the other writes."""
    (_, writes), (reads, _) = edges[min(one, other)], edges[max(one, other)]
    return not writes.isdisjoint(reads)


Enqueue = Callable[[], None]


class Lanes:
    """Puts the calls of launches in order; on the CPU branches run in their turn.

    Kernels that wait for the one in front of them
    on the device (programmatic launch) get such edges from a fork and at a join too. A stream for
    all branches would make each wait for the one before: 64.6 us instead of 62.7, and 68.4 without
    branches (se_resnet9_fixup, batch 128, H200, 2026-11-20).
    """

    def __init__(self, branches: Iterable[Branch], device: torch.device) -> None:
        self._lanes = [_Lane(b, device) for b in branches] if device.type == "cuda" else []

    @property
    def branches(self) -> list[Branch]:
        return [lane.branch for lane in self._lanes]

    @property
    def halved(self) -> frozenset[int]:
        """The places of the launches whose second half is a branch."""
        return frozenset(lane.branch.launch for lane in self._lanes if lane.branch.rest)

    def ordered(
        self,
        calls: Sequence[list[Enqueue]],
        places: range,
        rests: Mapping[int, Enqueue] | None = None,
        marks: Mapping[int, Enqueue] | None = None,
    ) -> list[Enqueue]:
        """The calls of the launches of one pass, which is over when all of it is. `rests` are the
        second halves of those that are `halved`; `marks` come before the launches of their places,
        after what is joined there.
        """
        mine = [lane for lane in self._lanes if lane.branch.launch in places]
        beside = {lane.branch.launch: lane for lane in mine if not lane.branch.rest}
        after = {lane.branch.launch: lane for lane in mine if lane.branch.rest}
        order: list[Enqueue] = []
        for place in (*places, places.stop):
            # A branch after this place may take the memory of one that is joined here.
            order += [lane.join for lane in mine if lane.branch.join == place]
            order += [marks[place]] if marks is not None and place in marks else []
            order += [lane.fork for lane in beside.values() if lane.branch.fork + 1 == place]
            if place in beside:
                order.append(beside[place].around(calls[place]))
            elif place in places:
                order += calls[place]
            if place in after:
                order.append(after[place].fork)
            if place - 1 in after:  # else the next launch would wait until this one has room
                order.append(after[place - 1].around([(rests or {})[place - 1]]))
        return order


class _Lane(Side):
    """The stream of one branch."""

    def __init__(self, branch: Branch, device: torch.device) -> None:
        super().__init__(device)
        self.branch = branch

    def around(self, calls: Sequence[Enqueue]) -> Enqueue:
        def call() -> None:
            with self.inside():
                for each in calls:
                    each()

        return call
