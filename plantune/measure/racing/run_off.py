"""More rounds for the routes that may be the fastest, where the first ones say too little of them.

On two cores that two other processes kept busy, single calls of some 10 ms took up to 580, a round
of ten routes took seconds, and five rounds gave the ratio of two of them an interval from 0.11 to
16.2. With 45 rounds its ends are apart by a factor of 1.4 to 1.6 (AMD EPYC, 2026-11-24).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from plantune.devices.device import Runnable
from plantune.measure.timing import Effort, Timing, joined, time_interleaved
from plantune.measure.watches import Watch

# Routes that look slower than this multiple of the fastest one take part no more, nor do more than
# so many. Other work only ever lengthens calls, so the lower quartiles tell them apart first.
NEAR, MOST_ROUTES = 1.5, 3

# A route and the kind of its images.
Turn = tuple[str, str]


def contenders(
    timings: Mapping[Turn, Timing], ours: Collection[str], live: Collection[str]
) -> set[str]:
    """Our routes, and those of the framework that may be its fastest or its fastest live one."""
    kept = set(ours)
    for kind in {kind for _, kind in timings}:
        lows = {n: t.low_us for (n, k), t in timings.items() if k == kind and n not in ours}
        ranked = sorted(lows, key=lows.__getitem__)
        kept.update(n for n in ranked[:MOST_ROUTES] if lows[n] <= NEAR * lows[ranked[0]])
        kept.update([name for name in ranked if name in live][:1])
    return kept


def with_more_rounds(
    timings: Mapping[Turn, Timing],
    calls: Mapping[Turn, Runnable],
    names: Collection[str],
    effort: Effort,
    watch: Watch,
) -> dict[Turn, Timing]:
    """The times with further rounds of these routes alone."""
    turns = [turn for turn in timings if turn[0] in names]
    more = time_interleaved([calls[turn] for turn in turns], effort, watch)
    again = dict(zip(turns, more, strict=True))
    return {t: joined(own, again[t]) if t in again else own for t, own in timings.items()}
