"""Places buffers in one arena so that those which live at the same time do not overlap."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from plantune.layouts import aligned


@dataclass(frozen=True)
class Lifetime:
    """A buffer that is needed from step `first` to step `last`, both included."""

    name: str
    size_bytes: int
    first: int
    last: int

    def meets(self, other: Lifetime) -> bool:
        """Whether both are needed at the same time."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class MemoryPlan:
    """Where each buffer starts in an arena of `size_bytes`."""

    starts: dict[str, int]
    size_bytes: int


def plan_memory(lifetimes: Iterable[Lifetime]) -> MemoryPlan:
    """Largest first, each at the lowest place that is free during its whole life."""
    placed: list[tuple[int, Lifetime]] = []
    for buffer in sorted(lifetimes, key=lambda b: (-b.size_bytes, b.first, b.name)):
        busy = sorted(
            (start, start + aligned(other.size_bytes))
            for start, other in placed
            if other.meets(buffer)
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
