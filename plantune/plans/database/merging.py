"""Plan files joined: one plan for each problem and environment, and where files disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plantune.errors import InvalidPlan, NoPlan
from plantune.plans.database.rows import Key, StoredPlan, newest_complete
from plantune.plans.database.team import FAULTS, plans_of


@dataclass(frozen=True)
class Sourced:
    """A stored plan with the file that has it."""

    path: Path
    stored: StoredPlan


@dataclass(frozen=True)
class Conflict:
    """Different plans of one problem and environment, in the order of the files."""

    key: Key
    plans: tuple[Sourced, ...]


@dataclass(frozen=True)
class Merged:
    """What files have together. `plans` holds the first file's plan where there is a conflict."""

    plans: Mapping[Key, StoredPlan]
    conflicts: tuple[Conflict, ...]

    def decided(self, winners: Mapping[Key, StoredPlan]) -> list[StoredPlan]:
        """The plans with these in place of others, in an order that does not depend on when each
        was found.
        """
        chosen = {**self.plans, **winners}
        return [chosen[key] for key in sorted(chosen, key=repr)]


def merged(files: Sequence[Path]) -> Merged:
    """Joins the newest complete plans of each file. The same plan in several files is not a
    conflict: the newest evidence for it stays.

    Raises InvalidPlan for a file that cannot be read, and NoPlan if all are empty.
    """
    found: dict[Key, list[Sourced]] = {}
    for path in files:
        for key, stored in _newest(path).items():
            _add(found.setdefault(key, []), Sourced(path, stored))
    if not found:
        raise NoPlan("no complete plan is in these files; run plantune search")
    conflicts = tuple(Conflict(k, tuple(plans)) for k, plans in found.items() if len(plans) > 1)
    return Merged({key: plans[0].stored for key, plans in found.items()}, conflicts)


def _newest(path: Path) -> dict[Key, StoredPlan]:
    try:
        stored = plans_of(path)
    except FAULTS as error:
        raise InvalidPlan(f"{path}: its plans cannot be read: {error}") from error
    return newest_complete(stored)


def _add(plans: list[Sourced], new: Sourced) -> None:
    for place, known in enumerate(plans):
        if _does(known.stored) == _does(new.stored):
            if new.stored.created_at > known.stored.created_at:
                plans[place] = new
            return
    plans.append(new)


def _does(stored: StoredPlan) -> tuple[object, ...]:
    """What a plan does, whatever was measured of it."""
    plan = stored.plan
    choices = frozenset((choice.nodes, choice.candidate) for choice in plan.choices)
    return choices, plan.branches, plan.route, plan.frozen_route
