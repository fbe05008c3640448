"""One plan for all ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable

from plantune.errors import UnsupportedModule
from plantune.plans.plan import Plan
from plantune.runtime.module import TunedModule
from plantune.training.ranks import Ranks

# What makes the module that runs a plan, or one that is chosen here; None if there can be none.
Make = Callable[[Plan | None], TunedModule | None]


def agreed(ranks: Ranks, kind: str, make: Make) -> TunedModule | None:
    """What runs calls of a kind, on all ranks from the plan that is chosen on rank 0; None if it is
    not planned there, or not all ranks have such a call now.

    Raises on all ranks what the choice or its use raises on one.
    """
    if not ranks.all_say(kind):
        return None
    own = ranks.together("the choice of a plan", lambda: _chosen(make) if not ranks.rank else None)
    text = ranks.gather("" if own is None else own[1].dumps())[0]
    if not text:
        return None

    def adopted() -> TunedModule | None:
        found = make(Plan.loads(text))
        return None if found is None else _checked(found)

    found = ranks.together("the plan of rank 0", adopted if own is None else lambda: own[0])
    return found if ranks.all_say("" if found is None else "runs it") else None


def _chosen(make: Make) -> tuple[TunedModule, Plan] | None:
    found = make(None)
    try:
        return None if found is None else (found, found.plan)
    except UnsupportedModule:
        return None


def _checked(module: TunedModule) -> TunedModule:
    """Raises here and not in its first call if the plan cannot run."""
    module.pool()
    return module
