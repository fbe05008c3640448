"""Which of the framework's routes a plan was raced against, as its evidence says it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from plantune.plans.written_words import BEST_ROUTE, RACED_ROUTES

# The route of torch.compile that was clearly faster, and by how much.
LOST_TO, LOSS = "lost_to", "loss"
COMPILED = "compile-"
NO_COMPILED = "never raced against torch.compile"
UNKNOWN = "which other routes it was raced against is not known"


@dataclass(frozen=True)
class RacedRoutes:
    """`complete` is false of plans from before these were kept: only the best one is known."""

    names: tuple[str, ...]
    complete: bool

    @staticmethod
    def of(evidence: Mapping[str, Any]) -> RacedRoutes:
        """Against which routes the plan with this evidence was raced."""
        kept, best = evidence.get(RACED_ROUTES), evidence.get(BEST_ROUTE)
        if isinstance(kept, str):
            return RacedRoutes(tuple(filter(None, kept.split(","))), complete=True)
        return RacedRoutes((best,) if isinstance(best, str) else (), complete=False)

    @property
    def compiled(self) -> bool | None:
        """Whether one of them was torch.compile's; None if that is not known."""
        if has_compiled(self.names):
            return True
        return False if self.complete else None

    @property
    def warning(self) -> str | None:
        """The caveat to print next to a ratio that is not against torch.compile."""
        if self.compiled:
            return None
        return UNKNOWN if self.compiled is None else NO_COMPILED

    def to_json(self) -> dict[str, Any]:
        """The names are null if only the best one is known."""
        names = list(self.names) if self.complete else None
        return {RACED_ROUTES: names, "met_compiled": self.compiled}


def has_compiled(names: Iterable[str]) -> bool:
    return any(name.startswith(COMPILED) for name in names)
