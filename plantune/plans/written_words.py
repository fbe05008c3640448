"""The code's words for keys and values that plans, databases and JSON are written with.

What is written never changes: earlier releases read it, and refuse what they do not know.
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

# Where a plan's choices come from: they are the framework's kernels, a guess by estimates, picked
# by hand, chosen by estimates for a chip that is not here, or found by a search.
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
    """The origin of a plan with these families; `default` stands for two."""
    if written != WRITTEN_ORIGINS[FRAMEWORK]:
        return written
    return FRAMEWORK if OF_FRAMEWORK.issuperset(families) else GUESS
