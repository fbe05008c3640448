"""Why a candidate was rejected, in a user's words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from plantune.base.outcome import Rejected

# By the stage at which it was rejected.
WHAT = {
    "build": "cannot be built",
    "memory": "takes too much memory",
    "crash": "crashed",
    "timeout": "took too long",
    "numerics": "wrong numbers",
    "roofline": "timed as faster than possible",
    "noisy": "could not be timed",
}
# Their numbers were right; only their times are unusable.
TIMING_STAGES = ("noisy", "roofline")
REASON_LENGTH, SHORT_LENGTH = 160, 80


def rejected_text(rejected: Rejected, length: int | None = REASON_LENGTH) -> str:
    """What went wrong, and the reason in one line, cut to `length` characters."""
    return f"{WHAT[rejected.stage]}: {' '.join(rejected.reason.split())[:length]}"


def counts_text(rejected: Iterable[Rejected]) -> str:
    """How many went wrong in which way; of one alone, why."""
    found = list(rejected)
    if len(found) == 1:
        return rejected_text(found[0], SHORT_LENGTH)
    counts = Counter(WHAT[each.stage] for each in found)
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())
