"""What a search is asked for, what it reports while it runs, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plantune.gpus import Seat
from plantune.measure.race import Race
from plantune.plan import Plan
from plantune.plan_db.rows import Found


@dataclass(frozen=True)
class Settings:
    """How to search: seconds in all, the seed of every draw, and what the winner races against.

    Without `baselines` these are all of the arch for which there is time. Without `shipped` a
    search begins from this machine's own plans only. `seats` are where workers measure beside each
    other; the first one also ranks and races.
    """

    budget_s: float = 90.0
    seed: int = 0
    fresh: bool = False
    storage: str | None = None
    baselines: tuple[str, ...] | None = None
    shipped: bool = True
    seats: tuple[Seat, ...] = ()


@dataclass(frozen=True)
class Result:
    """The plan that was found. A plan that is not `complete` was not ranked and raced to the end.

    `candidates` is the number of all; if `exhausted`, none of those that were not measured could be
    part of a faster plan, else there was no time for them. If there was no time for a race either,
    `plan` is the `known` one that calls use already, or runs the network as it is. `notes` say what
    disturbed the machine, and how that changed times.
    """

    plan: Plan
    complete: bool
    race: Race | None
    measured: int
    rejected: int
    candidates: int = 0
    exhausted: bool = True
    budget_s: float = 0.0
    known: Found | None = None
    spent_s: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Progress:
    """`phase` is measuring, ranking or racing; times are of the whole network, in microseconds.

    `best_us` is the best cover so far and `framework_us` the framework op by op, as sums of steps;
    both are estimates while some of their steps are not measured.
    """

    phase: str
    detail: str
    measured: int
    rejected: int
    best_us: float
    framework_us: float
    seconds_left: float


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Reports to nobody."""
