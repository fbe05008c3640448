"""How long calls take: warm, in batches that the clock can see, in turns, by the monotonic clock.

Times are in microseconds per call. Caches hold what the call before left in them. Samples in which
this process waited for a core, or a GPU was throttled, are discarded. A wide spread says that the
machine was disturbed in another way: such a run is repeated, and what stays wide is marked noisy.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plantune.devices.cuda.capture import no_collection
from plantune.devices.device import Runnable
from plantune.measure.watches import HOST, Sample, Watch
from plantune.plans.verdict import Interval

LEAST_SAMPLES = 5
# A budget has room for about so many.
MOST_SAMPLES = 200
# Quartiles further apart than this part of the median: something else ran here.
NOISY_SPREAD = 0.25
# A sample that waited for a core for a larger part of its time is discarded, if enough are left, or
# else one that waited for more than the second part. Beside two busy processes on two cores it was
# 0.6 to 1.7.
WAITED_PART, WAITED_MUCH = 0.02, 0.2
RESAMPLES, CONFIDENCE = 1000, 0.95
# Fewer rounds than LEAST_SAMPLES, where the time was up, say nothing of how far they vary: on cores
# that others kept busy, rounds of two equal programs gave ratios from 0.8 to 8.6 (2026-11-22).
DOUBT = 10.0


@dataclass(frozen=True)
class Effort:
    """How hard to measure.

    Sampling ends when `budget_s` is over, when the median is known to a part `tolerance` of itself,
    or when every sample is above `give_up_above_us`. While the result is noisy, the budget is spent
    again, up to `retries` times.

    `until` and `cut_at` are times of the monotonic clock, which all processes of a machine share.
    Nothing more is begun after `until`, but for the rounds without which no ratio is known, if they
    are quick; at `cut_at` the worker is killed. After `build_until` no further route is built.
    """

    budget_s: float = 0.3
    warm_up_s: float = 0.05
    tolerance: float = 0.005
    give_up_above_us: float | None = None
    retries: int = 2
    relative: bool = False
    until: float | None = None
    cut_at: float | None = None
    build_until: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more should be begun."""
        return self.until is not None and time.monotonic() >= self.until

    def has_room_for(self, seconds: float) -> bool:
        """Whether what was begun may take so much longer: half of what is left until the cut."""
        if self.until is None:
            return True
        if self.cut_at is None:
            return time.monotonic() + seconds < self.until
        return seconds < (self.cut_at - time.monotonic()) / 2

    def most_s(self, count: int) -> float:
        """The time that measuring so many callables may take, but for calls of its own length."""
        return (self.budget_s + self.warm_up_s * count) * (1 + self.retries)


@dataclass(frozen=True)
class Timing:
    """The time of one call in each sample, in the order in which they were taken.

    `shared` says that this process had to wait for a core in every one of them.
    """

    samples_us: tuple[float, ...]
    shared: bool = False

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def low_us(self) -> float:
        """The lower quartile."""
        return self._quartiles()[0]

    @property
    def high_us(self) -> float:
        """The upper quartile."""
        return self._quartiles()[2]

    @property
    def interval_us(self) -> tuple[float, float]:
        """The range of the median with a confidence of 95 %, by the ranks of the samples."""
        ordered, count = sorted(self.samples_us), self.samples
        aside = math.ceil(0.98 * math.sqrt(count))  # half of 1.96 standard deviations
        low = max((count - 1) // 2 - aside, 0)
        return ordered[low], ordered[min(count // 2 + aside, count - 1)]

    def percentile_us(self, percent: float) -> float:
        """The sample below or at which so many percent of them are."""
        ordered = sorted(self.samples_us)
        rank = math.ceil(round(percent / 100 * self.samples, 6))  # 99.9 % of 1,000 are 999
        return ordered[max(rank - 1, 0)]

    @property
    def samples(self) -> int:
        return len(self.samples_us)

    @property
    def spread(self) -> float:
        """The distance of the quartiles as a part of the median."""
        low, median, high = self._quartiles()
        return (high - low) / median if median else 0.0

    @property
    def noisy(self) -> bool:
        return self.shared or self.spread > NOISY_SPREAD or self.cut_short

    @property
    def cut_short(self) -> bool:
        """Whether the time was up before there were enough samples."""
        return self.samples < LEAST_SAMPLES

    def per(self, launches: int) -> Timing:
        """The time of each of so many launches in a call."""
        return Timing(tuple(us / launches for us in self.samples_us), self.shared)

    def settled(self, tolerance: float) -> bool:
        """Whether the median is known this well."""
        enough = self.samples >= 2 * LEAST_SAMPLES
        return enough and self.spread <= tolerance * math.sqrt(self.samples)

    def _quartiles(self) -> Sequence[float]:
        if len(self.samples_us) == 1:
            return self.samples_us * 3
        return statistics.quantiles(self.samples_us, method="inclusive")


def time_call(call: Runnable, effort: Effort, watch: Watch = HOST) -> Timing:
    """Times one callable."""
    return time_interleaved([call], effort, watch)[0]


def time_interleaved(
    calls: Sequence[Runnable], effort: Effort, watch: Watch = HOST
) -> list[Timing]:
    """Times callables in turns, so that a drift of the machine meets all of them.

    Sample number i of each is from the same round. Each round has an order of its own, and each
    turn starts with a call that is not timed, after which caches hold the callable's own data.
    """
    rounds: list[list[Sample]] = []
    gc.collect(1)  # all generations would take 0.3 s where inductor is loaded
    with no_collection():
        turn_s = effort.budget_s / MOST_SAMPLES / len(calls)
        batch_s = max(turn_s, watch.least_batch_s)
        counts = [_warm_up(call, effort, batch_s, watch) for call in calls]
        for _ in range(1 + effort.retries):
            end = time.perf_counter_ns() + effort.budget_s * 1e9
            while len(rounds) < LEAST_SAMPLES or time.perf_counter_ns() < end:
                start = time.monotonic()
                rounds.append(_round(calls, counts, len(rounds), watch))
                timings = _timings(rounds)
                missing_s = (LEAST_SAMPLES - len(rounds)) * (time.monotonic() - start)
                over = effort.is_over and (missing_s <= 0 or not effort.has_room_for(missing_s))
                seen = evened(timings) if effort.relative else timings
                if over or all(_is_done(timing, effort) for timing in seen):
                    return timings
            if not any(timing.noisy for timing in seen):
                break
    return timings


def _round(
    calls: Sequence[Runnable], counts: Sequence[int], number: int, watch: Watch
) -> list[Sample]:
    """A sample of each callable."""
    turns = {}
    for place in order_of_round(len(calls), number):
        if len(calls) > 1:
            calls[place]()
        turns[place] = watch.sample(calls[place], counts[place])
    return [turns[place] for place in range(len(calls))]


def order_of_round(count: int, number: int) -> list[int]:
    """The places of so many callables in a round. In `count` rounds each has every position once;
    in so many if the count is even, else in twice as many, each comes after all others alike.

    With the same neighbours in each round, of three equal plans the one between its likes was 4 to
    5 % faster than the one beside torch's routes (1.3 ms a call, 2 cores of an EPYC, 2026-11-28).
    """
    row, is_back = number % count, count % 2 and number // count % 2
    steps = [-(place // 2) if place % 2 == 0 else place // 2 + 1 for place in range(count)]
    order = [(row + step) % count for step in steps]
    return order[::-1] if is_back else order


def _is_done(timing: Timing, effort: Effort) -> bool:
    """Whether the median is known well enough, or even the best sample is too slow."""
    limit = math.inf if effort.give_up_above_us is None else effort.give_up_above_us
    hopeless = timing.samples >= LEAST_SAMPLES and min(timing.samples_us) > limit
    shared = timing.shared and not effort.relative
    return hopeless or (timing.settled(effort.tolerance) and not shared)


def _timings(rounds: Sequence[Sequence[Sample]]) -> list[Timing]:
    """One Timing for each callable, of the rounds in which no thread waited for a core.

    If they are too few, and those with short waits too, all count: beside two busy processes on two
    cores how long threads waited does not tell good samples from bad ones. Of 45 rounds the five
    with the least waiting gave a ratio an interval whose ends were apart by a factor of 2.1 to 5.9,
    all gave it one of 1.4 to 1.6 (medians of 60 draws from 90 rounds, AMD EPYC, 2026-11-24).
    """
    waited = [max(sample.waited for sample in turns) for turns in rounds]
    calm = any(part <= WAITED_PART for part in waited)
    limits = (WAITED_PART, WAITED_MUCH, math.inf)
    limit = next(m for m in limits if sum(w <= m for w in waited) >= LEAST_SAMPLES or m == math.inf)
    kept = [turns for turns, part in zip(rounds, waited, strict=True) if part <= limit]
    columns = zip(*kept, strict=True)
    return [Timing(tuple(sample.us for sample in column), shared=not calm) for column in columns]


def evened(timings: Sequence[Timing]) -> list[Timing]:
    """The times of calls that took turns, as on a machine of even speed: where a phase takes 1.7
    times as long, the median of half as many rounds lies anywhere between both.

    A round's pace is the median of all calls' times in it, each by that call's own usual time: by
    the median call itself, whatever disturbed that one alone would disturb all others instead.
    """
    if len(timings) < 2:
        return [*timings]
    parts = [[us / timing.median_us for us in timing.samples_us] for timing in timings]
    paces = [statistics.median(turn) for turn in zip(*parts, strict=True)]
    usual = statistics.median(paces)

    def even(timing: Timing) -> Timing:
        pairs = zip(timing.samples_us, paces, strict=True)
        return replace(timing, samples_us=tuple(us * usual / pace for us, pace in pairs))

    return [even(timing) for timing in timings]


def joined(one: Timing, more: Timing) -> Timing:
    """Both, of two runs one after the other."""
    return Timing((*one.samples_us, *more.samples_us), one.shared or more.shared)


def in_common(one: Timing, other: Timing) -> tuple[Timing, Timing]:
    """Both without the last rounds, in which only one of them took part."""
    rounds = min(one.samples, other.samples)
    first, second = (replace(t, samples_us=t.samples_us[:rounds]) for t in (one, other))
    return first, second


def ratio_interval(ours: Timing, theirs: Timing, resamples: int = RESAMPLES) -> Interval:
    """The ratio of two medians from one interleaved run, with its bootstrap interval.

    Rounds are drawn again, not samples: what disturbed one round disturbed both. Whoever
    judges the same rounds gets the same interval: a win for one is no tie for another.
    """
    pairs = list(zip(ours.samples_us, theirs.samples_us, strict=True))
    draw = random.Random(0)
    ratios = sorted(_ratio(draw.choices(pairs, k=len(pairs))) for _ in range(resamples))
    tail = round(resamples * (1 - CONFIDENCE) / 2)
    doubt = 1.0 if len(pairs) >= LEAST_SAMPLES else DOUBT
    ratio = _ratio(pairs)
    low, high = ratios[tail] / doubt, ratios[-1 - tail] * doubt
    return Interval(ratio, min(low, ratio), max(high, ratio), CONFIDENCE)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)


def _warm_up(call: Runnable, effort: Effort, batch_s: float, watch: Watch) -> int:
    """Calls until the time to warm up is over; returns how many calls make a batch."""
    end = time.perf_counter_ns() + effort.warm_up_s * 1e9
    batch_us = batch_s * 1e6
    count = 1
    while (took := watch.batch_us(call, count) * count) < batch_us or time.perf_counter_ns() < end:
        if took < batch_us / 2 and 2 * count <= watch.most_calls:
            count *= 2
        elif time.perf_counter_ns() >= end:
            break
    return count
