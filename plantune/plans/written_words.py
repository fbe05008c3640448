"""The code's names for the keys and values in plan files, databases and JSON.

Written keys and values never change: earlier releases read them, and refuse unknown ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# Keys of a plan: what runs the network, the plan's program or one of the framework's routes.
ROUTE: Final = "runner"
FROZEN_ROUTE: Final = "frozen_runner"

# Keys of a plan's evidence: the routes that it was raced against, and the fastest of them.
RACED_ROUTES: Final = "rivals"
BEST_ROUTE: Final = "baseline"
BEST_ROUTE_MS: Final = "baseline_ms"

# Keys of the document of `plantune bench`.
BEST_ROUTE_OF_BENCH: Final = "best_baseline"
BEST_LIVE_ROUTE_OF_BENCH: Final = "best_live_baseline"

# Where a plan's choices come from: the framework's kernels, a guess by estimates, a choice by hand,
# a prediction for a chip that is not here, or a search.
FRAMEWORK, GUESS, HAND = "framework", "guess", "hand"
PREDICTED, MEASURED = "predicted", "measured"
WRITTEN_ORIGINS = {
    FRAMEWORK: "default",
    GUESS: "default",
    HAND: "hand",
    MEASURED: "measured",
    PREDICTED: "predicted",
}
# The kernel families that run torch's own kernels, or nothing.
OF_FRAMEWORK = frozenset({"framework", "view"})


def origin_of(written: str, families: Iterable[str]) -> str:
    """The origin of a plan with these families: `default` is written for two of them."""
    if written != WRITTEN_ORIGINS[FRAMEWORK]:
        return written
    return FRAMEWORK if OF_FRAMEWORK.issuperset(families) else GUESS
