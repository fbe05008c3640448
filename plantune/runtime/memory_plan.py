"""Places buffers in one arena so that those which live at the same time do not overlap."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.layouts import aligned
from plantune.runtime.binding import Take, fresh


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


def taker(plan: MemoryPlan, apart: Container[str], device: torch.device) -> Take:
    """Gives each planned buffer its place in one arena, all else memory of its own.

    Those `apart` share their memory with no other value.
    """
    arena = fresh(plan.size_bytes, device)

    def take(name: str, size_bytes: int) -> tuple[Tensor, int]:
        if name in plan.starts and name not in apart:
            return arena, plan.starts[name]
        return fresh(size_bytes, device), 0

    return take
