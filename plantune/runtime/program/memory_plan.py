"""When each value of a schedule is needed, and its place in an arena that it shares with others."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plantune.graph.layouts import aligned
from plantune.runtime.program.binding import Take, fresh
from plantune.runtime.program.branches import Branch
from plantune.runtime.program.schedule import Schedule, ScheduledStep


@dataclass(frozen=True)
class Lifetime:
    """A buffer that is needed from step `first` to step `last`, both included."""

    name: str
    size_bytes: int
    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        """Whether both are needed at the same time."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class MemoryPlan:
    """Where each buffer starts in an arena of `size_bytes`."""

    starts: dict[str, int]
    size_bytes: int


def plan_memory(lifetimes: Iterable[Lifetime]) -> MemoryPlan:
    """Each at the lowest place that is free during its whole life, in the better of two orders:
    largest first, or those of about one size as they are made. The second takes 884 instead of 905
    MiB for se_resnet9_fixup in training with 2,048 images, which is as much as lives at once.
    """
    buffers = [*lifetimes]
    return min((_placed(buffers, order) for order in ORDERS), key=lambda plan: plan.size_bytes)


def _by_size(buffer: Lifetime) -> tuple[object, ...]:
    return -buffer.size_bytes, buffer.first, buffer.name


def _by_class(buffer: Lifetime) -> tuple[object, ...]:
    return -buffer.size_bytes.bit_length(), buffer.first, -buffer.size_bytes, buffer.name


ORDERS = (_by_size, _by_class)


def _placed(buffers: Iterable[Lifetime], order: Callable[[Lifetime], Any]) -> MemoryPlan:
    placed: list[tuple[int, Lifetime]] = []
    for buffer in sorted(buffers, key=order):
        busy = sorted(
            (start, start + aligned(other.size_bytes))
            for start, other in placed
            if other.overlaps(buffer)
        )
        placed.append((_lowest_gap(busy, aligned(buffer.size_bytes)), buffer))
    size = max((start + aligned(buffer.size_bytes) for start, buffer in placed), default=0)
    return MemoryPlan({buffer.name: start for start, buffer in placed}, size)


def _lowest_gap(busy: list[tuple[int, int]], size: int) -> int:
    start = 0
    for begin, end in busy:
        if begin - start >= size:
            break
        start = max(start, end)
    return start


def taker(buffers: Iterable[Lifetime], apart: Container[str], device: torch.device) -> Take:
    """Gives each buffer its place in one arena, all else memory of its own.

    Those `apart` share their memory with no other value.
    """
    plan = plan_memory(buffer for buffer in buffers if buffer.name not in apart)
    arena = fresh(plan.size_bytes, device)

    def take(name: str, size_bytes: int) -> tuple[Tensor, int]:
        if name in plan.starts:
            return arena, plan.starts[name]
        return fresh(size_bytes, device), 0

    return take


@dataclass(frozen=True)
class Liveness:
    """`buffers` are to be placed in the arena. `kept_outside` are adopted values and views; `drops`
    names, per launch of forward and backward, those of them that nothing reads afterwards. `spent`
    are the buffers of the forward pass that others may overwrite in the backward pass.
    """

    buffers: tuple[Lifetime, ...]
    drops: tuple[tuple[str, ...], ...]
    kept_outside: tuple[str, ...]
    spent: tuple[str, ...] = ()


def passes(schedule: Schedule) -> tuple[ScheduledStep, ...]:
    """The launches of the forward and the backward pass, in order."""
    return (*schedule.phase("forward"), *schedule.phase("backward"))


def liveness(
    schedule: Schedule, branches: Iterable[Branch] = (), *, seeds: bool = False
) -> Liveness:
    """Follows every value from its making to its last use. A view is a use of what it views.
    `seeds`, the gradients of outputs, are copied into their places before a backward pass.

    Of what the backward pass reads, values outside of the arena stay until its end, so that it can
    run twice. Results stay until the end of their pass, when the caller takes them. A branch holds
    what it touches as long as it may run.
    """
    uses = _Uses()
    launches = passes(schedule)
    beside = {branch.launch: branch.beside for branch in branches if not branch.rest}
    rests = {branch.launch: branch.beside for branch in branches if branch.rest}
    for when, launch in enumerate(launches):
        uses.launch(beside.get(when, range(when, when + 1)), launch, schedule)
        if when in rests:
            uses.rest(rests[when], launch)
    graph = schedule.graph
    turn, end = len(schedule.phase("forward")) - 1, len(launches)
    for name, type_ in graph.output_gradients if seeds else ():
        uses.make(name, type_.size_bytes, range(turn + 1, turn + 2))
    for name in (*graph.outputs, *(value for _, value in graph.updates)):
        uses.use(name, turn)
    for _, name in graph.gradients:
        uses.use(name, end)
    spent = uses.cross(turn, end)
    results = graph.results
    drops: list[list[str]] = [[] for _ in launches]
    for name in uses.kept_outside:
        when = uses.last[uses.root(name)]
        if when < len(launches) and name not in results and name not in uses.crossing:
            drops[when].append(name)
    buffers = [
        Lifetime(name, size, uses.first[name], uses.last[name]) for name, size in uses.sizes.items()
    ]
    return Liveness(tuple(buffers), tuple(map(tuple, drops)), tuple(uses.kept_outside), spent)


class _Uses:
    """First and last use per value, where views count for the value they view."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.roots: dict[str, str] = {}
        self.kept_outside: list[str] = []
        self.crossing: set[str] = set()

    def root(self, name: str) -> str:
        return self.roots.get(name, name)

    def use(self, name: str, when: int) -> None:
        root = self.root(name)
        self.last[root] = max(self.last.get(root, when), when)

    def make(self, name: str, size_bytes: int, when: range) -> None:
        self.first[name], self.sizes[name] = when[0], size_bytes
        self.use(name, when[-1])

    def launch(self, when: range, launch: ScheduledStep, schedule: Schedule) -> None:
        """`when` are the launches while which it may run."""
        for conversion in launch.conversions:
            self.use(conversion.source, when[-1])
            self.make(conversion.result, schedule.graph.types[conversion.source].size_bytes, when)
        for name, _ in launch.step.inputs:
            self.use(name, when[-1])
        aliases, adopts = launch.aliases, launch.adopts
        for name, type_ in launch.step.outputs:
            if name in aliases:
                self.roots[name] = self.root(aliases[name])
            if name in aliases or name in adopts:
                self.first[name] = when[0]
                self.kept_outside.append(name)
                self.use(name, when[-1])
            else:
                self.make(name, type_.size_bytes, when)
        if launch.workspace_bytes:
            self.make(launch.workspace, launch.workspace_bytes, when)

    def rest(self, when: range, launch: ScheduledStep) -> None:
        """`when` are the launches while which its second half may run."""
        for name in (*launch.rest, *([launch.workspace] if launch.workspace_bytes else ())):
            self.use(name, when[-1])

    def cross(self, turn: int, end: int) -> tuple[str, ...]:
        """The buffers that cross from forward to backward, and are free after their last reader."""
        last = {name: self.last[self.root(name)] for name in self.first}
        self.crossing = {name for name, made in self.first.items() if made <= turn < last[name]}
        return tuple(name for name in self.sizes if name in self.crossing and last[name] < end)
