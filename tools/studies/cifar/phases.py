"""What the phases of training steps take: on a GPU by events, elsewhere by the clock."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from typing import Any

import torch

NAMES = ("data", "forward", "backward", "optimizer", "whole", "other")
# The first calls with a batch of some size compile, choose algorithms or capture graphs.
FIRST_CALLS = 3


class Phases:
    """Marks between the phases of each step; every moment belongs to one phase, so they add up."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._steps: list[tuple[int, list[tuple[str, Any]]]] = []
        self._marks: list[tuple[str, Any]] = []
        self._seen: Counter[int] = Counter()

    def begin(self) -> None:
        self._marks = [("", self._now())]

    def mark(self, name: str) -> None:
        """What was enqueued since the last mark is that phase."""
        self._marks.append((name, self._now()))

    def end(self, batch: int) -> None:
        """A step with so many images is over; the first ones with as many are forgotten."""
        self.mark("other")
        self._seen[batch] += 1
        if self._seen[batch] > FIRST_CALLS:
            self._steps.append((batch, self._marks))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        if self._on_gpu:
            return float(first.elapsed_time(second))
        return float(second - first) * 1e3

    def means(self, batch: int) -> dict[str, float]:
        """Milliseconds of a step with so many images, by phase; none if there was none."""
        if self._on_gpu:
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        steps = [marks for of, marks in self._steps if of == batch]
        for marks in steps:
            for (_, begin), (name, end) in pairwise(marks):
                found[name] = found.get(name, 0.0) + self._between(begin, end) / len(steps)
        return {name: found[name] for name in NAMES if name in found}
