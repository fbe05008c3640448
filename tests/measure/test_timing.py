from __future__ import annotations

import ast
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import plantune.measure
from plantune.measure import timing, watches
from plantune.measure.timing import (
    LEAST_SAMPLES,
    Effort,
    Timing,
    order_of_round,
    ratio_interval,
    time_call,
    time_interleaved,
)
from plantune.measure.watches import BYTES_PER_THREAD, LEAST_BATCH_S, ColdWatch, Sample


class Clock:
    """A clock that moves only when a call says so, and how long threads waited for a core."""

    def __init__(self) -> None:
        self.now_us = 1e9
        self.waited_us = 0.0
        self.order: list[str] = []

    def taking(self, cost_us: float | Iterator[float], name: str = "") -> Callable[[], None]:
        """A callable that takes so long, or as long as the next number says."""

        def call() -> None:
            self.order.append(name)
            self.now_us += cost_us if isinstance(cost_us, (int, float)) else next(cost_us)

        return call

    def wait(self, us: float) -> None:
        """The thread stands in line for a core."""
        self.now_us += us
        self.waited_us += us


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: int(fake.now_us * 1e3))
    monkeypatch.setattr(timing.time, "monotonic", lambda: fake.now_us / 1e6)
    monkeypatch.setattr(watches, "waited_ns", lambda: int(fake.waited_us * 1e3))
    return fake


def spent_s(clock: Clock) -> float:
    return clock.now_us / 1e6 - 1e3


def test_a_steady_call_is_timed_exactly(clock):
    found = time_call(clock.taking(40), Effort())
    assert (found.median_us, found.low_us, found.high_us) == pytest.approx((40, 40, 40))
    assert not found.noisy


def test_it_stops_early_when_the_spread_is_small(clock):
    found = time_call(clock.taking(40), Effort(budget_s=10))
    assert found.samples == 2 * LEAST_SAMPLES
    assert spent_s(clock) < 2


@pytest.mark.parametrize("cost_us", [0.05, 3, 700, 30_000])
def test_batches_are_long_enough_for_the_clock(clock, cost_us):
    found = time_call(clock.taking(cost_us), Effort(budget_s=0.01, retries=0))
    calls_a_sample = len(clock.order) / found.samples
    assert calls_a_sample * cost_us >= LEAST_BATCH_S * 1e6 / 2
    assert found.median_us == pytest.approx(cost_us, rel=0.05)


def test_cold_calls_do_not_count(clock):
    def costs():
        yield from [5000.0] * 8
        while True:
            yield 100.0

    found = time_call(clock.taking(costs()), Effort(warm_up_s=0.05))
    assert found.high_us == pytest.approx(100)


def test_it_gives_up_what_cannot_win(clock):
    slow = time_call(clock.taking(900), Effort(give_up_above_us=500))
    assert slow.samples == LEAST_SAMPLES
    close = time_call(clock.taking(900), Effort(give_up_above_us=950))
    assert close.samples > LEAST_SAMPLES


def alternating(*costs_us: float) -> Iterator[float]:
    while True:
        for cost in costs_us:
            yield from [cost] * 16


def test_the_budget_is_kept(clock):
    found = time_call(clock.taking(alternating(900, 1000)), Effort(budget_s=0.5, tolerance=0))
    assert not found.noisy
    assert 0.4 < spent_s(clock) < 0.8


def test_a_wide_spread_is_tried_again_and_marked(clock):
    effort = Effort(budget_s=0.2, retries=3)
    found = time_call(clock.taking(alternating(500, 5000)), effort)
    assert found.noisy
    assert 0.8 < spent_s(clock) < 1.2


def test_a_slow_call_gets_few_samples(clock):
    assert time_call(clock.taking(2e6), Effort(retries=0)).samples == LEAST_SAMPLES


def test_nothing_is_begun_after_the_end_of_its_time(clock):
    slow = [clock.taking(2e6, "a"), clock.taking(3e6, "b")]
    found = time_interleaved(slow, Effort(until=1e3 + 12))
    assert [timing.samples for timing in found] == [1, 1]
    assert clock.order == ["a", "b", "a", "a", "b", "b"]  # each warmed up, then one round
    assert all(timing.noisy for timing in found)


def test_quick_rounds_without_which_nothing_is_known_are_run_after_the_end(clock):
    quick = [clock.taking(1e4, "a"), clock.taking(2e4, "b")]
    found = time_interleaved(quick, Effort(until=1e3, cut_at=1e3 + 20))
    assert [timing.samples for timing in found] == [LEAST_SAMPLES, LEAST_SAMPLES]


def test_quick_rounds_are_run_however_late_they_begin_before_the_cut(clock):
    """Building the routes may take most of what a race had: a plan at a quarter of eager's time was
    a tie then.
    """
    quick = [clock.taking(1e4, "a"), clock.taking(2e4, "b")]
    found = time_interleaved(quick, Effort(until=1e3 - 10, cut_at=1e3 + 2))
    assert [timing.samples for timing in found] == [LEAST_SAMPLES, LEAST_SAMPLES]


def test_slow_rounds_are_not_run_into_the_cut(clock):
    slow = [clock.taking(2e6, "a"), clock.taking(3e6, "b")]
    found = time_interleaved(slow, Effort(until=1e3 + 12, cut_at=1e3 + 40))
    assert [timing.samples for timing in found] == [1, 1]


def test_too_few_rounds_are_never_sure(clock):
    calls = [clock.taking(2e6), clock.taking(3e6)]
    hasty = ratio_interval(*time_interleaved(calls, Effort(until=0.0)))
    assert hasty.low < hasty.ratio < 1 < hasty.high
    assert ratio_interval(*time_interleaved(calls, Effort(retries=0))).high < 1


def crowded(clock: Clock, cost_us: float) -> Callable[[], None]:
    """In two of three stretches of 40 ms, another process takes the core longer than the work."""

    def call() -> None:
        clock.order.append("crowded")
        clock.now_us += cost_us
        if clock.now_us // 40_000 % 3:
            clock.wait(4000)

    return call


def test_samples_that_waited_for_a_core_are_discarded(clock):
    found = time_call(crowded(clock, 300), Effort(budget_s=0.6))
    assert found.high_us == pytest.approx(300)
    assert not found.noisy


def test_where_every_sample_waited_it_is_noisy_though_steady(clock):
    def call() -> None:
        clock.now_us += 300
        clock.wait(4000)

    found = time_call(call, Effort(budget_s=0.1, retries=1))
    assert found.shared
    assert found.noisy
    assert found.spread == 0


def test_turns_meet_the_same_drift(clock):
    """The machine slows down to a third; the ratio stays."""

    def drifting(base_us: float) -> Callable[[], None]:
        def call() -> None:
            clock.now_us += base_us * (1 + 2 * min(spent_s(clock) / 1.5, 1))

        return call

    effort = Effort(budget_s=1.5, tolerance=0, retries=0)
    slow, fast = time_interleaved([drifting(400), drifting(200)], effort)
    assert slow.high_us > 1.3 * slow.low_us
    interval = ratio_interval(fast, slow)
    assert interval.ratio == pytest.approx(0.5, rel=0.03)
    assert 0.46 < interval.low <= interval.ratio <= interval.high < 0.54


@pytest.mark.parametrize("relative", [True, False])
def test_phases_that_slow_all_calls_say_nothing_of_their_order(clock, monkeypatch, relative):
    """Every second round takes ten times as long, and yet it is known at once who is faster."""
    pace, paces, one_round = [1.0], itertools.cycle([1.0, 10.0]), timing._round

    def at_its_pace(*arguments: Any) -> list[Sample]:
        pace[0] = next(paces)
        return one_round(*arguments)

    def taking(base_us: float) -> Callable[[], None]:
        def call() -> None:
            clock.now_us += base_us * pace[0]

        return call

    monkeypatch.setattr(timing, "_round", at_its_pace)
    effort = Effort(4.0, warm_up_s=0, tolerance=0.02, relative=relative)
    found = time_interleaved([taking(4e3), taking(2e3)], effort)
    assert (found[0].samples == 2 * LEAST_SAMPLES) == relative
    assert (spent_s(clock) > 3 * 4.0) == (not relative)  # repeated, as it stays noisy
    assert found[0].spread > 1
    assert ratio_interval(*found).ratio == pytest.approx(2)


def test_each_round_has_an_order_of_its_own(clock):
    names = "abcdef"
    calls = [clock.taking(alternating(500, 700), name) for name in names]
    found = time_interleaved(calls, Effort(budget_s=1.0, warm_up_s=0, tolerance=0, retries=0))
    (rounds,) = {timing.samples for timing in found}
    taken = [name for name, _ in itertools.groupby(clock.order)]
    assert taken[-len(names) :] == [names[at] for at in order_of_round(len(names), rounds - 1)]


@pytest.mark.parametrize("count", range(1, 12))
def test_orders_of_rounds_are_balanced(count):
    rounds = 2 * count
    orders = [order_of_round(count, number) for number in range(rounds)]
    assert all(sorted(order) == [*range(count)] for order in orders)
    for position in range(count):
        assert Counter(order[position] for order in orders) == dict.fromkeys(range(count), 2)
    followed = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert followed == dict.fromkeys(itertools.permutations(range(count), 2), 2)
    half = Counter(order[0] for order in orders[:count])
    assert half == dict.fromkeys(range(count), 1)


def test_a_round_in_which_one_waited_counts_for_none(clock):
    calls = [clock.taking(300, "alone"), crowded(clock, 200)]
    alone, beside = time_interleaved(calls, Effort(budget_s=0.6, tolerance=0))
    assert alone.samples == beside.samples < clock.order.count("alone") / 4
    assert beside.high_us == pytest.approx(200)


def timing_of(*samples: float) -> Timing:
    return Timing(tuple(samples))


def test_quartiles():
    found = timing_of(1, 2, 3, 4, 100)
    assert (found.low_us, found.median_us, found.high_us) == (2, 3, 4)
    assert timing_of(7).low_us == timing_of(7).high_us == 7


def test_the_latest_but_one_of_a_thousand():
    """99.9 / 100 * 1000 is a little more than 999."""
    assert Timing(tuple(map(float, range(1, 1001)))).percentile_us(99.9) == 999


def test_the_interval_of_a_tie_holds_one():
    ours = timing_of(*(100 + i % 7 for i in range(40)))
    theirs = timing_of(*(100 + (i * 3) % 7 for i in range(40)))
    interval = ratio_interval(ours, theirs)
    assert interval.low <= 1 <= interval.high
    assert interval == ratio_interval(ours, theirs)


def test_the_interval_narrows_with_rounds():
    def width(rounds: int) -> float:
        ours = timing_of(*(80 + i * 37 % 11 for i in range(rounds)))
        theirs = timing_of(*(100 + i * 53 % 13 for i in range(rounds)))
        found = ratio_interval(ours, theirs)
        assert found.low < 1
        return found.high - found.low

    assert width(200) < width(10)


def drawn(rounds: int, noise: str, random: Random) -> tuple[Timing, Timing]:
    """A call that takes 0.8 of another's time, in so many rounds."""

    def taken(us: float, pace: float) -> float:
        late = random.expovariate(8) if noise == "skewed" and random.random() < 0.3 else 0.0
        return us * pace * (1 + late) * random.lognormvariate(0, 0.03)

    paces = [1.7 if noise == "phases" and turn // 4 % 2 else 1.0 for turn in range(rounds)]
    pairs = [(taken(80, pace), taken(100, pace)) for pace in paces]
    ours, theirs = zip(*pairs, strict=True)
    return Timing(ours), Timing(theirs)


@pytest.mark.parametrize("rounds", [LEAST_SAMPLES, 12, 30])
@pytest.mark.parametrize("noise", ["even", "skewed", "phases"])
def test_the_interval_holds_the_true_ratio_as_often_as_it_says(noise, rounds):
    """95 % in the long run; of 150 races two standard deviations of luck are 3.6 %."""
    random = Random(3)
    found = [ratio_interval(*drawn(rounds, noise, random), resamples=120) for _ in range(150)]
    held = sum(interval.low <= 0.8 <= interval.high for interval in found)
    assert held >= 0.9 * len(found)
    assert statistics.median(f.high / f.low for f in found) < 1.25


def test_a_real_call_is_timed():
    """Beside a call's own clock: its batches take at least as long as all that it saw."""
    took_us = []

    def spin() -> None:
        start = time.perf_counter_ns()
        while time.perf_counter_ns() < start + 300_000:
            pass
        took_us.append((time.perf_counter_ns() - start) / 1e3)

    before = time.perf_counter_ns()
    found = time_call(spin, Effort(budget_s=0.2, retries=0))
    all_us = (time.perf_counter_ns() - before) / 1e3
    assert min(took_us) <= min(found.samples_us)
    assert sum(found.samples_us) <= all_us


def test_the_wall_clock_may_jump(monkeypatch):
    def jump() -> float:
        raise AssertionError("the wall clock was read")

    monkeypatch.setattr(time, "time", jump)
    monkeypatch.setattr(time, "time_ns", jump)
    assert time_call(lambda: None, Effort(budget_s=0.02, warm_up_s=0.01)).median_us > 0


WALL_CLOCKS = {"time", "time_ns", "ctime", "localtime", "gmtime", "datetime"}


@pytest.mark.parametrize(
    "path", sorted(Path(plantune.measure.__path__[0]).glob("*.py")), ids=lambda path: path.stem
)
def test_no_module_reads_the_wall_clock(path):
    tree = ast.parse(path.read_text())
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("time", "datetime")
    }
    assert read.isdisjoint(WALL_CLOCKS)


def test_between_cold_calls_other_memory_is_written(clock, monkeypatch):
    """Which takes time, but not the call's."""
    watch, written = ColdWatch(), []
    call = clock.taking(40, "call")

    class Others:
        def add_(self, value: float) -> None:
            written.append(len(clock.order))
            clock.now_us += 500

    monkeypatch.setattr(watch, "_others", Others())
    found = time_call(call, Effort(budget_s=0.05), watch)
    assert set(found.samples_us) == {40.0}
    assert written == [*range(len(clock.order))]


def test_a_thread_that_waited_while_other_memory_was_written_waited_for_a_part(clock, monkeypatch):
    watch = ColdWatch()

    class Others:
        def add_(self, value: float) -> None:
            clock.now_us += 990
            clock.wait(10)

    monkeypatch.setattr(watch, "_others", Others())
    sample = watch.sample(clock.taking(1000), 1)
    assert sample == Sample(1000.0, 10 / 2000)


def test_other_memory_is_larger_than_the_caches_of_all_threads():
    threads = torch.get_num_threads()
    assert ColdWatch()._others.nbytes == threads * BYTES_PER_THREAD
