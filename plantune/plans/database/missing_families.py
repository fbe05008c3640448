"""Passes over stored plans that name an unknown kernel family: another release had it, or its
package is not installed. Such a plan is treated as if it were not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plantune.base.warning import warn
from plantune.errors import DatabaseWarning
from plantune.kernels.registry import is_family
from plantune.plans.database.rows import StoredPlan
from plantune.plans.plan import Plan

WHAT_TO_DO = "`plantune search` finds a plan of the families that are here"
# Plans that this process has warned of, by file and id.
_warned: set[tuple[str, int]] = set()


def missing_family(plan: Plan) -> str | None:
    """The first unknown family of a plan; None if all are known."""
    named = dict.fromkeys(choice.candidate.family for choice in plan.choices)
    return next((name for name in named if not is_family(name)), None)


def with_known_families(stored: Iterable[StoredPlan], place: str) -> list[StoredPlan]:
    """The plans of a file whose families are all known; warns of the others."""
    every = list(stored)
    passed_over = [item for item in every if missing_family(item.plan) is not None]
    warn_of(passed_over, place)
    return [item for item in every if item not in passed_over]


def warn_of(passed_over: Sequence[StoredPlan], place: str) -> None:
    """Warns once per file, and once per plan."""
    new = [item for item in passed_over if (place, item.id) not in _warned]
    if not new:
        return
    _warned.update((place, item.id) for item in new)
    first = new[0]
    more = f" and {len(new) - 1} more" if new[1:] else ""
    warn(
        f"{place}: plan {first.id} for {first.plan.problem}{more}: passed over, for the kernel "
        f"family {missing_family(first.plan)!r:.80} is not here (removed, or its package is not "
        f"installed); {WHAT_TO_DO}",
        DatabaseWarning,
    )
