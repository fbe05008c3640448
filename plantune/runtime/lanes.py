"""Branches on streams of their own, ordered with the caller's stream by events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from plantune.runtime.branches import Branch
from plantune.runtime.streams import Side

Call = Callable[[], None]


class Lanes:
    """Puts the calls of launches in order; on the CPU branches run in their turn.

    Kernels that wait for the one in front of them
    on the device (programmatic launch) get such edges from a fork and at a join, too. A stream for
    all branches would make each wait for the one before: 64.6 us instead of 62.7, and 68.4 without
    branches (se_resnet9_fixup, batch 128, H200, 2026-11-20).
    """

    def __init__(self, branches: Iterable[Branch], device: torch.device) -> None:
        self._lanes = [_Lane(b, device) for b in branches] if device.type == "cuda" else []

    def ordered(self, calls: Sequence[list[Call]], places: range) -> list[Call]:
        """The calls of the launches of one pass, which is over when all of it is."""
        mine = [lane for lane in self._lanes if lane.branch.launch in places]
        beside = {lane.branch.launch: lane for lane in mine}
        order: list[Call] = []
        for place in (*places, places.stop):
            # A branch behind this place may take the memory of one that is joined here.
            order += [lane.join for lane in mine if lane.branch.join == place]
            order += [lane.fork for lane in mine if lane.branch.fork + 1 == place]
            if place in beside:
                order.append(beside[place].around(calls[place]))
            elif place in places:
                order += calls[place]
        return order


class _Lane(Side):
    """The stream of one branch."""

    def __init__(self, branch: Branch, device: torch.device) -> None:
        super().__init__(device)
        self.branch = branch

    def around(self, calls: Sequence[Call]) -> Call:
        def call() -> None:
            with self.inside():
                for each in calls:
                    each()

        return call
