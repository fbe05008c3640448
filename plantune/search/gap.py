"""Why a race says another time than the steps did, in a line."""

from __future__ import annotations

import math

from plantune.measure.entrants import PLANTUNE
from plantune.measure.machine_state import State
from plantune.measure.race import Race

# What launches, conversions and caches add to a sum of steps, or save of it, at most.
USUAL = 1.5


def gap_lines(race: Race, plan_us: float, eager_us: float, state: State) -> list[str]:
    """A line for each of the two, plan and eager, whose race differs much from its steps."""
    lines = []
    for name, sum_us in ((PLANTUNE, plan_us), ("eager", eager_us)):
        timing = race.timings.get(name)
        if timing is None or not math.isfinite(sum_us) or sum_us <= 0:
            continue
        factor = timing.median_us / sum_us
        if not 1 / USUAL <= factor <= USUAL:
            what = f"{name}: {timing.median_us / 1e3:.3g} ms in the race, its steps alone"
            lines.append(f"{what} {sum_us / 1e3:.3g} ms: {_why(factor, timing.noisy, state)}")
    return lines


def _why(factor: float, noisy: bool, state: State) -> str:
    if state.reason:
        return f"{state.reason} during the race"
    if noisy:
        return "the race was disturbed, its times vary widely"
    if factor < 1:
        return "the machine was slower, or disturbed, while the steps were measured"
    return "launches, conversions and cold caches between the steps"
