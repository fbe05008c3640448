"""What a search is asked for, what it reports while it runs, and what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from plantune.devices.gpus import Slot
from plantune.measure.racing.race import Race
from plantune.plans.database.rows import Found
from plantune.plans.plan import Plan

# How many heartbeats a search may miss, and for how many a database may be unreachable.
SILENT, GONE = 6, 6


@dataclass(frozen=True)
class Patience:
    """How often a search shows that it lives; what follows from that are seconds too."""

    heartbeat_s: int = 10

    @property
    def silent_s(self) -> int:
        """After how long without a heartbeat another search counts as dead."""
        return SILENT * self.heartbeat_s

    @property
    def gone_s(self) -> float:
        """For how long a database may be unreachable."""
        return float(GONE * self.heartbeat_s)


@dataclass(frozen=True)
class SearchOptions:
    """How to search: seconds in all, the seed of every draw, and what the winner races against.

    Without `routes` these are all of the arch for which there is time. Without `shipped` a
    search begins from this machine's own plans only. `slots` are where workers measure beside each
    other; the first one also ranks and races. With `patience` the storage is one that searches on
    other hosts share. `spent_s` of the budget were spent before: on Python and torch.
    """

    budget_s: float = 90.0
    seed: int = 0
    fresh: bool = False
    storage: str | None = field(default=None, repr=False)
    routes: tuple[str, ...] | None = None
    shipped: bool = True
    slots: tuple[Slot, ...] = ()
    patience: Patience | None = None
    spent_s: float = 0.0


@dataclass(frozen=True)
class Result:
    """The plan that was found. A plan that is not `complete` was not ranked and raced to the end.

    `candidates` is the number of all; if `exhausted`, none of those that were not measured could be
    part of a faster plan, else there was no time for them. If there was no time for a race either,
    `plan` is the `known` one that calls use already, or runs the network as it is. `notes` say what
    disturbed the machine, and how that changed times. `elsewhere` says that another search ranked
    and raced, and that the plan was proved here. `stages_s` is what each stage took: preparing,
    measuring, which is what several GPUs share, and those that one of them does alone.
    `nothing_left` is why no plan could be proved and raced, or none is needed: the framework runs.
    """

    plan: Plan
    complete: bool
    race: Race | None
    measured: int = 0
    rejected: int = 0
    candidates: int = 0
    exhausted: bool = True
    budget_s: float = 0.0
    known: Found | None = None
    spent_s: float = 0.0
    notes: tuple[str, ...] = ()
    elsewhere: bool = False
    stages_s: Mapping[str, float] = field(default_factory=dict)
    nothing_left: str | None = None

    @property
    def is_raced(self) -> bool:
        """Whether the plan may run: it was raced, or needs no race. An interrupted search may have
        got so far, too.
        """
        return self.complete or self.race is not None

    @property
    def unraced(self) -> str | None:
        """What is kept if no plan got through a race in time; None if one did."""
        if not self.complete or self.race is not None or self.elsewhere:
            return None
        if self.nothing_left is not None:
            return f"eager runs the network: {self.nothing_left}"
        text = f"{self.budget_s:g} s were too short to race a plan"
        if self.known is None:
            return f"{text}; the network runs as it is, which is never slower"
        return f"{text}; the plan that is used already stays"


@dataclass(frozen=True)
class StepsSum:
    """What the steps of a network take one by one, added up; `estimated` of them were not measured.
    Infinite if it is not known.
    """

    us: float = math.inf
    steps: int = 0
    estimated: int = 0


@dataclass(frozen=True)
class Progress:
    """`stage` is measuring, ranking or racing.

    `best` is the best cover so far and `framework` the framework call by call, both with what is
    known at this moment. `whole_us` is the time of the best plan that was timed as a whole;
    infinite before there is one.
    """

    stage: str
    detail: str
    measured: int
    rejected: int
    candidates: int
    best: StepsSum
    framework: StepsSum
    seconds_left: float
    whole_us: float = math.inf


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Discards all reports."""
