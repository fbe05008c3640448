"""Whether the machine is quiet before something is timed: said, and waited for a little."""

from __future__ import annotations

import time
from collections.abc import Callable

from plantune.cli.console import note
from plantune.measure.machine_state import Machine

LOOK_S = 0.3
# At most this part of the budget goes to waiting.
PART, MOST_S = 0.05, 5.0


def wait_for_quiet(
    budget_s: float, machine: Machine, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Looks until nothing else runs or the time for that is over, and warns of what runs still."""
    left_s = min(PART * budget_s, MOST_S)
    while True:
        sleep(LOOK_S)
        left_s -= LOOK_S
        reason = machine.look().reason
        if not reason or left_s < LOOK_S:
            break
    if reason:
        note(f"warning: the machine is busy, so timings are less reliable: {reason}")
