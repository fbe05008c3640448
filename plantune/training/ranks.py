"""What the processes of a group tell each other of one training step, through the group's store.

Collectives of the network's backend carry gradients alone: what is said here can be waited for with
an end, and a rank that failed can still be read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from plantune.errors import RanksDiffer
from plantune.training.groups import Group, new_store

T = TypeVar("T")
# Between two looks for what another rank says.
FIRST_WAIT_S, MOST_WAIT_S = 0.001, 0.05


class Ranks:
    """The ranks of a group. Calls of the step have the numbers 1, 2, ... on each of them; 0 is
    before the first.

    In a call ranks may `gather` values, until one of them says that it is `past`: from then on it
    only waits for collectives, and whoever waits for it here learns that it does not come.
    """

    def __init__(self, group: Group, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.rank, self.size = group.rank(), group.size()
        self.call = 0
        self._meetings = 0
        self._past = -1
        self._left: str | None = None
        self._connection: tuple[Group, Store] | None = group, new_store(group)

    @property
    def group(self) -> Group:
        return self._connected()[0]

    @property
    def store(self) -> Store:
        return self._connected()[1]

    def forget(self) -> None:
        """Lets go of the group and its store. As long as something holds these, rank 0 serves the
        store, and a group that is made later meets in it what was said in this one: NCCL's id of a
        communicator that is gone, for which it waits without end.
        """
        self._connection = None

    def _connected(self) -> tuple[Group, Store]:
        if self._connection is None:
            raise RuntimeError(f"rank {self.rank} no longer takes part: it {self._left}")
        return self._connection

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def begin(self) -> None:
        """Begins the next call."""
        if self._left is not None:
            raise RanksDiffer(
                f"rank {self.rank} no longer takes part: it {self._left}; end all ranks and start "
                "them again"
            )
        self.call += 1
        self._meetings = 0

    @property
    def is_past(self) -> bool:
        return self._past == self.call

    def past(self) -> None:
        """No collectives from here to the end of this call."""
        self._past = self.call

    def gather(self, value: str) -> list[str | None]:
        """What each rank says at this point of this call; None for one that does not come here.

        Raises RanksDiffer if one has failed, or nothing is heard of it until the deadline.
        """
        self._meetings += 1
        place = f"{self.call}.{self._meetings}"
        self.store.set(f"meet/{place}/{self.rank}", value)
        found: dict[int, str | None] = {self.rank: value}
        began_s, wait_s = time.monotonic(), FIRST_WAIT_S
        while missing := [rank for rank in range(self.size) if rank not in found]:
            for rank in missing:
                said = self._heard(rank, place)
                if said is not None:
                    found[rank] = said[0]
            if len(found) < self.size:
                self._look_at_time(began_s, missing)
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, MOST_WAIT_S)
        return [found[rank] for rank in range(self.size)]

    def all_say(self, value: str) -> bool:
        """Whether all meet here with the same value."""
        return all(said == value for said in self.gather(value))

    def together(self, what: str, act: Callable[[], T]) -> T:
        """What `act` gives on this rank; if it raises on one of them, all raise."""
        result, error = None, None
        try:
            result = act()
        except Exception as raised:
            error = raised
        said = self.gather("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        first = next((at for at, text in enumerate(said) if text), None)
        if first is not None:
            raise RanksDiffer(f"{what} failed on rank {first}: {said[first]}")
        return result  # type: ignore[return-value]

    def must_agree(self, what: str, lines: Sequence[str]) -> None:
        """Raises RanksDiffer on all ranks unless they say the same, with the first difference."""
        said = self.gather("\n".join(lines))
        for rank, text in enumerate(said):
            if text == said[0]:
                continue
            first, other = _difference(said[0] or "nothing", text or "nothing")
            raise RanksDiffer(f"{what} differ: rank 0 has {first}, rank {rank} has {other}")

    def leave(self, why: str, last: int) -> None:
        """Tells the others that this rank takes part in no call after the `last` one."""
        if self._left is None:
            self._left = why
            with suppress(RuntimeError):  # the store is gone with the rank that kept it
                self.store.set(f"left/{self.rank}", f"{last} {why}")

    def left(self, rank: int) -> tuple[int, str] | None:
        """The last call in which a rank took part, and why there is no later one."""
        key = f"left/{rank}"
        if not self.store.check([key]):
            return None
        call, _, why = self.store.get(key).decode().partition(" ")
        return int(call), why

    def report(self) -> None:
        """A sign of life; others learn from it which calls are past."""
        self.store.set(f"alive/{self.rank}", f"{self._past} {self.call} {time.time():.1f}")

    def heard_of(self, rank: int) -> str:
        """The last sign of life of a rank, in words."""
        key = f"alive/{rank}"
        if not self.store.check([key]):
            return f"nothing was heard of rank {rank}"
        _, call, reported_s = self.store.get(key).decode().split()
        ago_s = max(time.time() - float(reported_s), 0.0)
        return f"rank {rank} was alive {ago_s:.0f} s ago, in its call {call}"

    def _heard(self, rank: int, place: str) -> tuple[str | None] | None:
        """What a rank says at a place, None if it has gone past; nothing if that is not known."""
        key = f"meet/{place}/{rank}"
        if self.store.check([key]):
            return (self.store.get(key).decode(),)
        left = self.left(rank)
        if left is not None and left[0] < self.call:
            raise RanksDiffer(f"rank {rank} {left[1]}")
        if self._past_of(rank) < self.call:
            return None
        # It may have met between the two looks.
        return (self.store.get(key).decode(),) if self.store.check([key]) else (None,)

    def _past_of(self, rank: int) -> int:
        key = f"alive/{rank}"
        return int(self.store.get(key).split()[0]) if self.store.check([key]) else -1

    def _look_at_time(self, began_s: float, missing: Sequence[int]) -> None:
        if time.monotonic() - began_s > self.deadline_s:
            heard = "; ".join(map(self.heard_of, missing))
            raise RanksDiffer(
                f"rank {self.rank} has waited {self.deadline_s:g} s in its call {self.call}: "
                f"{heard}. All ranks must make the same calls of the training step"
            )


def _difference(one: str, other: str) -> tuple[str, str]:
    """The first lines of two texts that are not the same."""
    for first, second in zip(one.splitlines(), other.splitlines(), strict=False):
        if first != second:
            return first, second
    return f"{len(one.splitlines())} entries", f"{len(other.splitlines())}"
