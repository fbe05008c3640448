"""Rounds beside other work, on a clock of the test's own."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from plantune.devices.device import CPU
from plantune.measure import timing, watches
from plantune.measure.racing import race
from plantune.measure.racing.built_routes import BuiltRoute
from plantune.measure.racing.run_off import contenders
from plantune.measure.timing import Effort, Timing, time_interleaved
from plantune.measure.watches import HOST, Sample


class Crowded:
    """A clock beside two processes that keep both cores busy: a quarter of all calls lose a core
    for several times their own length, and the threads of each wait for one.
    """

    def __init__(self, seed: int = 0) -> None:
        self.now_us, self.waited_us = 1e9, 0.0
        self.draw = random.Random(seed)
        self.busy = 0.25

    def taking(self, cost_us: float) -> Callable[[], None]:
        def call() -> None:
            lost = self.draw.expovariate(1 / 8) if self.draw.uniform(0, 1) < self.busy else 0.0
            took_us = cost_us * (1 + lost) * self.draw.uniform(0.9, 1.1)
            self.now_us += took_us
            self.waited_us += self.busy * took_us

        return call


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Crowded:
    return all_by(Crowded(), monkeypatch)


def all_by(clock: Crowded, monkeypatch: pytest.MonkeyPatch) -> Crowded:
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: int(clock.now_us * 1e3))
    monkeypatch.setattr(timing.time, "monotonic", lambda: clock.now_us / 1e6)
    monkeypatch.setattr(watches, "waited_ns", lambda: int(clock.waited_us * 1e3))
    return clock


def test_where_all_rounds_were_disturbed_all_count(
    crowded: Crowded, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, one_round = [], timing._round
    monkeypatch.setattr(timing, "_round", lambda *of: rounds.append(one_round(*of)) or rounds[-1])
    calls = [crowded.taking(8e3), crowded.taking(10e3)]
    ours, theirs = time_interleaved(calls, Effort(8.0, warm_up_s=0.01, retries=0))
    assert ours.shared
    assert ours.samples == theirs.samples == len(rounds) > 2 * timing.LEAST_SAMPLES


def test_where_threads_waited_little_the_longest_waits_are_left_out() -> None:
    """Eight rounds waited for a tenth of their time, two for all of it and took twice as long."""
    parts = [0.1] * 4 + [1.0] + [0.1] * 4 + [1.0]
    rounds = [[Sample(200.0 if part == 1.0 else 100.0, part), Sample(50.0, 0.05)] for part in parts]
    slow, fast = timing._timings(rounds)
    assert slow.samples_us == (100.0,) * 8
    assert fast.samples == 8
    assert slow.shared


def built(clock: Crowded, ms: float, promise: str) -> BuiltRoute:
    return BuiltRoute(clock.taking(1e3 * ms), clock.taking(1e3 * ms), promise, 1.0)


ROUTES = {"a": (12.0, "frozen"), "b": (13.0, "live"), "c": (19.0, "live"), "d": (22.0, "live")}
SLOW = {f"slow {number}": (30.0 + number, "live") for number in range(6)}


def test_the_routes_that_may_win_run_on_and_the_rest_of_the_time_is_theirs(
    crowded: Crowded,
) -> None:
    routes = {"plantune": (10.0, "live"), **ROUTES, **SLOW}
    ready = {name: built(crowded, *route) for name, route in routes.items()}
    start, budget_s = crowded.now_us, 10.0
    found = race._timed(ready, Effort(budget_s, warm_up_s=0.01), HOST, CPU, True)
    rounds = {name: detail.queued["same"].samples for name, detail in found.items()}
    assert rounds["plantune"] == rounds["a"] == rounds["b"] == max(rounds.values())
    assert rounds["slow 5"] < rounds["plantune"] / 2
    assert (crowded.now_us - start) / 1e6 < 1.2 * race.LONGEST * budget_s
    judged = race._judged(found)
    assert judged.best_route in ("a", "b")
    assert judged.ratio is not None
    assert not judged.ratio.is_wide


def test_their_interval_mostly_holds_the_true_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    for seed in range(20):
        clock = all_by(Crowded(seed), monkeypatch)
        routes = {"plantune": (10.0, "live"), "a": ROUTES["a"], **SLOW}
        ready = {name: built(clock, *route) for name, route in routes.items()}
        found = race._timed(ready, Effort(10.0, warm_up_s=0.01), HOST, CPU, True)
        ratio = race._judged(found).ratio
        assert ratio is not None
        held.append(ratio.low < 10 / 12 < ratio.high)
    assert sum(held) >= 17, held


def test_quiet_rounds_are_enough_for_all(crowded: Crowded) -> None:
    crowded.busy = 0.0
    ready = {n: built(crowded, *w) for n, w in {"plantune": (10.0, "live"), **ROUTES}.items()}
    found = race._timed(ready, Effort(10.0, warm_up_s=0.01), HOST, CPU, True)
    assert len({detail.queued["same"].samples for detail in found.values()}) == 1


def test_the_contenders_are_ours_those_near_the_best_and_the_best_live_one() -> None:
    def slow_once(us: float) -> Timing:
        return Timing((us, us, us, 40 * us, 60 * us))

    times = {"ours": 10, "a": 20, "b": 29, "c": 31, "live": 90, "slow": 95}
    timings = {(name, "same"): slow_once(us) for name, us in times.items()}
    assert contenders(timings, ["ours"], ["live", "slow"]) == {"ours", "a", "b", "live"}


def test_a_route_with_fewer_rounds_is_not_the_best() -> None:
    """It was left out because it looked slow; the median of few rounds may be anything."""
    timings = {"few": Timing((1.0,) * 3), "many": Timing((2.0,) * 9)}
    assert race.best_of(timings, [*timings]) == "many"
