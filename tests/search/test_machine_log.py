"""Slow spells: waited for, corrected, marked; and why a race differs from its steps."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from plantune.base.outcome import Measured, Rejected
from plantune.measure.machine_state import Machine, State
from plantune.measure.racing.race import Race
from plantune.measure.timing import Timing
from plantune.search.budget import Budget
from plantune.search.contenders.judgement import race_notes
from plantune.search.machine_log import MachineLog, SlowSpells
from plantune.search.results import StepsSum

MEASURED = Measured(30.0, 27.0, 33.0, 9, 1e-7, 1e-6, True)
BUSY = State(2, others=1.9, names=("yes", "yes"))
QUIET = State(2)


def spells(slowdowns: Iterable[float], slept: list[float]) -> SlowSpells:
    """With these slowdowns one after the other, each read anew."""
    values = iter(slowdowns)
    machine = Machine()
    machine.slowdown = lambda: next(values)  # type: ignore[method-assign]
    ticks = iter(range(0, 1000, 10))
    return SlowSpells(machine, Budget(20.0), lambda: float(next(ticks)), slept.append)


def measured(during: SlowSpells) -> Measured:
    with during.watched() as slowdown:
        pass
    outcome = slowdown.corrected(MEASURED)
    assert isinstance(outcome, Measured)
    return outcome


def test_a_quiet_machine_changes_nothing() -> None:
    slept: list[float] = []
    assert measured(spells([1.0, 1.1], slept)) == MEASURED
    assert slept == []


def test_the_end_of_a_slow_phase_is_waited_for() -> None:
    slept: list[float] = []
    assert measured(spells([2.0, 2.0, 1.0], slept)) == MEASURED
    assert len(slept) == 2


def test_where_it_does_not_end_times_are_those_of_the_machine_at_its_best() -> None:
    slept: list[float] = []
    outcome = measured(spells([3.0] * 6 + [2.0], slept))
    assert (outcome.median_us, outcome.low_us, outcome.high_us) == (15.0, 13.5, 16.5)
    assert sum(slept) == pytest.approx(1.0)  # a twentieth of the budget


def test_a_phase_that_ended_meanwhile_corrects_nothing() -> None:
    assert measured(spells([3.0] * 6 + [1.0], [])) == MEASURED
    with spells([1.0], []).watched() as slowdown:
        pass
    assert slowdown.corrected(Rejected("noisy", "x")) == Rejected("noisy", "x")


def log(**states: State) -> MachineLog:
    """With these states by stage."""
    machine = Machine()
    left = iter(states.values())
    machine.look = lambda: next(left)  # type: ignore[method-assign]
    found = MachineLog(machine)
    for stage in states:
        found.snapshot(stage)
    return found


def test_a_plan_says_what_disturbed_its_search() -> None:
    calm = log(measuring=QUIET, race=QUIET)
    assert calm.evidence() == {"machine": "quiet"}
    assert calm.warnings() == ()
    disturbed = log(measuring=QUIET, race=BUSY)
    assert disturbed.evidence() == {
        "machine": "busy",
        "disturbed_by": "other processes took 1.9 of 2 cores (yes, yes)",
    }
    (line,) = disturbed.warnings()
    assert line.startswith("the machine was not quiet during race: other processes took 1.9 of 2")


def race(ours_us: float, eager_us: float, spread: float = 0.0) -> Race:
    def timing(us: float) -> Timing:
        return Timing(tuple(us * (1 + spread * (i % 3 - 1)) for i in range(9)))

    return Race({"plantune": timing(ours_us), "eager": timing(eager_us)}, {}, "eager", None)


def test_a_race_near_its_steps_needs_no_word() -> None:
    assert race_notes(race(5000, 9000), StepsSum(4700, 3), StepsSum(9700, 9), BUSY) == []
    assert race_notes(race(5000, 9000), StepsSum(), StepsSum(0.0), BUSY) == []


def test_a_sum_of_estimates_explains_nothing() -> None:
    assert race_notes(race(5000, 9000), StepsSum(100, 3, 1), StepsSum(100, 9, 9), BUSY) == []


@pytest.mark.parametrize(
    ("ours", "spread", "state", "why"),
    [
        (471e3, 0.0, BUSY, "other processes took 1.9 of 2 cores (yes, yes) during the race"),
        (471e3, 0.5, QUIET, "the race was disturbed, its times vary widely"),
        (9e3, 0.0, QUIET, "launches, conversions and cold caches between the steps"),
        (2e3, 0.0, QUIET, "the machine was slower, or disturbed, while the steps were measured"),
    ],
)
def test_a_race_far_from_its_steps_is_explained(
    ours: float, spread: float, state: State, why: str
) -> None:
    (line,) = race_notes(race(ours, 9700, spread), StepsSum(4700, 3), StepsSum(9700, 9), state)
    assert line.startswith(f"plantune: {ours / 1e3:.3g} ms in the race, its steps alone 4.7 ms: ")
    assert line.endswith(why)
