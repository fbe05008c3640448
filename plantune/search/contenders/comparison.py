"""Times of whole plans as a search compares them: evened, of several makes, tied, the fastest."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

from plantune.base.outcome import Rejected
from plantune.kernels.registry import family_named
from plantune.measure import timing as timings_of
from plantune.measure.timing import Timing, in_common, joined, ratio_interval
from plantune.plans.plan import Plan
from plantune.search import policy
from plantune.search.contenders.contender import choose_alike


def fastest(plans: Sequence[Plan], timings: Sequence[Timing | Rejected]) -> int | None:
    """The index of the plan to keep, None if none ran: of those that tie with the fastest, and do
    not look much slower either, the simplest one, with fewer compiled kernels, then fewer steps.
    """
    times = {i: timing for i, timing in enumerate(timings) if isinstance(timing, Timing)}
    if not times:
        return None
    best = min(times, key=lambda i: times[i].median_us)
    near_us = (1 + policy.UNSURE) * times[best].median_us
    near = [i for i in times if times[i].median_us <= near_us]
    ties = [i for i in near if is_tie(times[i], times[best])]
    return min(ties, key=lambda i: (complexity(plans[i]), times[i].median_us))


def close(timings: Sequence[Timing | Rejected], kind: str) -> list[int]:
    """The indices of those that may be the fastest on this kind of arch."""
    times = {i: timing.median_us for i, timing in enumerate(timings) if isinstance(timing, Timing)}
    least = min(times.values(), default=0.0)
    near = [i for i, us in times.items() if us <= (1 + policy.CLOSE[kind]) * least]
    return sorted(sorted(near, key=times.__getitem__)[: policy.MOST_CLOSE])


def evened(timings: Sequence[Timing | Rejected]) -> list[Timing | Rejected]:
    """The times of plans that ran in the same rounds, as on a machine of even speed."""
    found = iter(timings_of.evened([t for t in timings if isinstance(t, Timing)]))
    return [next(found) if isinstance(t, Timing) else t for t in timings]


def whole(makes: Sequence[Sequence[Timing | Rejected]]) -> Sequence[Sequence[Timing | Rejected]]:
    """The makes that were timed. One for which the time was up says nothing of a plan."""
    return [found for found in makes if not any(map(is_late, found))] or makes[:1]


def of_makes(makes: Sequence[Sequence[Timing | Rejected]]) -> list[Timing | Rejected]:
    """The times of plans, each make of which was timed in the same rounds as that of the others."""
    rows = zip(*makes, strict=True)
    return [next((t for t in row if isinstance(t, Rejected)), None) or _joined(row) for row in rows]


def with_more(
    timings: Sequence[Timing | Rejected], more: Mapping[int, Timing | Rejected], makes: int
) -> list[Timing | Rejected]:
    """The times with those of so many further makes of some of the plans, as if the machine had
    kept its speed. As many rounds of the first make stay as each other has: all count alike.
    """
    pairs = [(timings[i], again) for i, again in more.items()]
    both = [(a, b) for a, b in pairs if isinstance(a, Timing) and isinstance(b, Timing)]
    rounds = min((again.samples // makes for _, again in both), default=0)
    pace = statistics.median([b.median_us / a.median_us for a, b in both] or [1.0])
    found = [_paced(timing, pace, rounds) for timing in timings]
    for i, again in more.items():
        before = found[i]
        if isinstance(before, Timing) and isinstance(again, Timing):
            found[i] = joined(before, again)
        elif isinstance(again, Rejected) and not is_late(again):
            found[i] = again
    return found


def _paced(timing: Timing | Rejected, pace: float, rounds: int) -> Timing | Rejected:
    if not rounds or isinstance(timing, Rejected):
        return timing
    return replace(timing, samples_us=tuple(us * pace for us in timing.samples_us[:rounds]))


def is_late(found: Timing | Rejected) -> bool:
    """Whether the time was up before this was timed."""
    return isinstance(found, Rejected) and found.stage == "timeout"


def _joined(makes: Sequence[Timing | Rejected]) -> Timing:
    return reduce(joined, [made for made in makes if isinstance(made, Timing)])


def kept(
    before: Sequence[Plan],
    plans: Sequence[Plan],
    timings: Sequence[Timing | Rejected],
    winner: int,
) -> int:
    """The index of the winner if it is clearly faster than the plans that were there before, else
    of the first one than which it is not: a plan is never replaced by a worse one.
    """
    best = timings[winner]
    for known in before:
        index = next((i for i, plan in enumerate(plans) if choose_alike(plan, known)), None)
        found = None if index is None else timings[index]
        if index is None or not isinstance(found, Timing) or not isinstance(best, Timing):
            continue
        if not ratio_interval(*in_common(best, found), resamples=policy.TIE_RESAMPLES).high < 1:
            return index
    return winner


def is_tie(one: Timing, other: Timing) -> bool:
    """Whether two that were timed in turns differ by at most TIE, or not for sure.

    The spread of each alone would say less: a machine whose clock has two speeds affects both.
    """
    interval = ratio_interval(*in_common(one, other), resamples=policy.TIE_RESAMPLES)
    return interval.low <= 1 + policy.TIE and interval.high >= 1 - policy.TIE


def complexity(plan: Plan) -> tuple[int, int]:
    """How many choices compile something, and how many choices there are."""
    compiled = sum(family_named(c.candidate.family).build_s > 0 for c in plan.choices)
    return (compiled, len(plan.choices))
