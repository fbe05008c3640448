"""Races a plan against the framework's routes, in turns: the last judgement of the plan."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from plantune.devices.cuda.flags import flags
from plantune.devices.device import Device, Runnable, first_line
from plantune.errors import PlantuneError, WorkerDied
from plantune.measure.limits import rejection
from plantune.measure.programs import NO_TIME, Say
from plantune.measure.racing.built_routes import (
    MOST_IMAGES,
    PLANTUNE,
    PLANTUNE_FROZEN,
    BuiltRoute,
    RouteBuilder,
)
from plantune.measure.racing.call_parts import parts_us
from plantune.measure.racing.latency import gpu_us, host_us, time_latencies
from plantune.measure.racing.routes import LIVE
from plantune.measure.racing.run_off import Turn, contenders, with_more_rounds
from plantune.measure.subject import Raced
from plantune.measure.timing import Effort, Timing, ratio_interval, time_interleaved
from plantune.measure.watches import Watch, call_watch
from plantune.plans.plan import Plan
from plantune.plans.verdict import Interval

OURS = (PLANTUNE, PLANTUNE_FROZEN)
# The same images in each call, or others each time.
SAME, FRESH = "same", "fresh"
# The part of the time that goes to queued calls; single ones have the rest.
QUEUED_PART = 0.6
# On busy cores a call may take a hundred times as long: after so many times the budget no round of
# calls begins, however few there were. Those of all routes end after a part of that, those of the
# routes that may be the fastest after another one.
LONGEST, ALL_PART, FEW_PART = 6.0, 0.35, 0.85
NOT_BUILT = "the time for building was over before its turn"

Sides = tuple[float | None, float | None]


@dataclass(frozen=True)
class Detail:
    """All that is known of one route: `queued` and `latency` by the kind of images.

    `host_us` and `gpu_us` are what a call takes of each of the two; None on a CPU. `parts_us` are
    the parts of a call in training, by their names.
    """

    promise: str
    build_s: float
    cached: bool
    static: bool
    queued: Mapping[str, Timing]
    latency: Mapping[str, Timing] = field(default_factory=dict)
    host_us: float | None = None
    gpu_us: float | None = None
    parts_us: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Race:
    """Who ran, how fast, and why others did not.

    `ratio` is the plan's median by that of the best of the framework's routes; None if one of the
    two is missing. `timings` are of queued calls on those images, the same or fresh ones, on which
    that ratio is the worse: `images` says which. `peaks_mib` is what each route on a GPU takes of
    its memory in a call, its weights included. `difference` is how far apart the plans for training
    and for inference are, as a part of the largest output; None in a race of the latter.
    """

    timings: Mapping[str, Timing]
    failures: Mapping[str, str]
    best_route: str | None
    ratio: Interval | None
    peaks_mib: Mapping[str, float] = field(default_factory=dict)
    images: str = SAME
    in_turns: int = 1
    details: Mapping[str, Detail] = field(default_factory=dict)
    clocks_mhz: Sequence[int] = ()
    difference: float | None = None


def best_of(timings: Mapping[str, Timing], names: Sequence[str]) -> str | None:
    """The fastest of these routes; if some had more rounds, one of them. None if none ran."""
    ran = [name for name in names if name in timings]
    most = max((timings[name].samples for name in ran), default=0)
    longest = [name for name in ran if timings[name].samples == most]
    return min(longest, key=lambda name: timings[name].median_us, default=None)


def race(
    say: Say,
    raced: Raced,
    plan: Plan | None,
    routes: Sequence[str],
    effort: Effort,
    seed: int,
    *,
    detailed: bool = False,
) -> Race:
    """Times the plan and the named routes in turns; one that fails says why, and so does
    one whose turn comes after the effort's `until` or `build_until`.

    What can stand in for the plan races as its tuned module would run it, since that race decides
    who does. If it is `detailed`, as it runs without plantune; all also on fresh images, call by
    call, and the plan frozen. cuDNN times its algorithms for all routes. Raises WrongResult if
    the plan's output is not the network's.
    """
    say("build")
    most_images, deployed = (MOST_IMAGES, None) if detailed else (1, plan)
    with _blaming("the framework"):
        builder = RouteBuilder(raced, seed, most_images, deployed)
    mode = raced.problem.mode
    with torch.set_grad_enabled(mode == "train"):
        ours = _ours(builder, plan, frozen=detailed and mode == "infer")
        with flags(benchmark=True):
            theirs, failures = _framework_routes(builder, routes, effort, say, detailed)
            ready = {**ours, **theirs}
            say("time")
            watch = call_watch(builder.device)
            with _blaming(" and ".join(ready)):
                details = _timed(ready, effort, watch, builder.device, detailed)
                difference = builder.between_plans() if detailed else None
    judged = _judged(details)
    turns = builder.in_turns if detailed else 1
    return replace(
        judged,
        failures=failures,
        peaks_mib=builder.peaks_mib,
        in_turns=turns,
        details=details,
        clocks_mhz=watch.clocks_mhz,
        difference=difference,
    )


def _ours(builder: RouteBuilder, plan: Plan | None, *, frozen: bool) -> dict[str, BuiltRoute]:
    ready: dict[str, BuiltRoute] = {}
    if plan is None:
        return ready
    for name in OURS[: 1 + frozen]:
        with _blaming(name):
            make = partial(_planned, builder, plan, frozen=name == PLANTUNE_FROZEN)
            ready[name] = builder.weighed(name, make)
    return ready


def _planned(builder: RouteBuilder, plan: Plan, *, frozen: bool) -> BuiltRoute:
    made = builder.plan(plan, frozen=frozen)
    builder.device.give_back_memory()  # as eager's algorithms do when they are compared
    return made


def _framework_routes(
    builder: RouteBuilder, names: Sequence[str], effort: Effort, say: Say, detailed: bool
) -> tuple[dict[str, BuiltRoute], dict[str, str]]:
    """The routes that can be made, and why the others cannot."""
    ready: dict[str, BuiltRoute] = {}
    failures: dict[str, str] = {}
    for name in sorted(names, key=builder.is_captured):
        if ready and effort.is_over:
            failures[name] = NO_TIME
            continue
        if ready and effort.build_until is not None and time.monotonic() >= effort.build_until:
            failures[name] = NOT_BUILT
            continue
        say("build")
        try:
            ready[name] = builder.weighed(name, partial(builder.framework_route, name))
            if detailed:
                ready[name] = builder.with_static_images(name, ready[name])
        except Exception as error:  # It may fail in any way that torch knows.
            if not builder.device.works():
                raise WorkerDied(f"{name}: {first_line(error)}") from error
            if name not in ready:  # else it runs, and copies its images
                failures[name] = _reason(error)
    return ready, failures


def _timed(
    ready: Mapping[str, BuiltRoute], effort: Effort, watch: Watch, device: Device, detailed: bool
) -> dict[str, Detail]:
    """All routes and kinds of images in one interleaved run, then call by call in another."""
    kinds = (SAME, FRESH) if detailed else (SAME,)
    calls = {(n, kind): getattr(e, kind) for n, e in ready.items() for kind in kinds}
    in_order, part = list(calls.values()), QUEUED_PART if detailed else 1.0
    queueing, start = replace(effort, budget_s=part * effort.budget_s), time.monotonic()
    late = start + LONGEST * effort.budget_s
    queued = _queued(ready, calls, queueing, watch, late - start) if calls else {}
    left = replace(effort, budget_s=(1 - part) * effort.budget_s, until=late)
    single = time_latencies(in_order, left, watch) if detailed else []
    none: Sides = (None, None)
    sides = _sides(ready, device) if detailed and device.captures else {}
    return {
        name: Detail(
            built.promise,
            built.build_s,
            built.cached,
            built.static,
            _by_kind(name, queued),
            _by_kind(name, dict(zip(calls, single, strict=False))),
            *sides.get(name, none),
            _parts(built, device) if detailed else {},
        )
        for name, built in ready.items()
    }


def _queued(
    ready: Mapping[str, BuiltRoute],
    calls: Mapping[Turn, Runnable],
    effort: Effort,
    watch: Watch,
    longest_s: float,
) -> dict[Turn, Timing]:
    """Calls in a row: of all routes, then of some if the first rounds say too little of them."""
    start, detailed = time.monotonic(), any(kind == FRESH for _, kind in calls)
    ends = [start + part * longest_s for part in ((ALL_PART, FEW_PART) if detailed else (1.0,))]
    first = replace(effort, until=effort.until or ends[0])
    timed = time_interleaved([*calls.values()], first, watch)
    queued = dict(zip(calls, timed, strict=True))
    ours = [name for name in OURS if name in ready]
    if not detailed or PLANTUNE not in ready or not _is_open(queued):
        return queued
    live = {name for name, built in ready.items() if built.promise == LIVE}
    names = contenders(queued, ours, live - {*ours})
    return with_more_rounds(queued, calls, names, replace(effort, until=ends[-1]), watch)


def _is_open(queued: Mapping[Turn, Timing]) -> bool:
    """Whether on any kind of images the ratio to the best route is not known well."""
    return any(
        ratio is not None and ratio.is_wide
        for ratio in (_best_ratio(_of_kind(kind, queued))[1] for kind in {k for _, k in queued})
    )


def _of_kind(kind: str, timings: Mapping[Turn, Timing]) -> dict[str, Timing]:
    return {name: timing for (name, other), timing in timings.items() if other == kind}


def _by_kind(name: str, timings: Mapping[Turn, Timing]) -> dict[str, Timing]:
    return {kind: timing for (other, kind), timing in timings.items() if other == name}


def _sides(ready: Mapping[str, BuiltRoute], device: Device) -> dict[str, Sides]:
    """What a call of each route takes of the host and of the GPU."""
    calls = [built.same for built in ready.values()]
    timed = zip(ready, calls, host_us(calls, device), strict=True)
    return {name: (host, gpu_us(call, device, host)) for name, call, host in timed}


def _parts(built: BuiltRoute, device: Device) -> dict[str, float]:
    return {} if built.marked is None else parts_us(built.marked, device)


def _judged(details: Mapping[str, Detail]) -> Race:
    """The headline is the worse of both kinds of images."""
    kinds = next(iter(details.values())).queued if details else (SAME,)
    return max(
        (_judged_on(kind, details) for kind in kinds),
        key=lambda found: 0.0 if found.ratio is None else found.ratio.ratio,
    )


def _judged_on(kind: str, details: Mapping[str, Detail]) -> Race:
    timings = {name: detail.queued[kind] for name, detail in details.items()}
    best, ratio = _best_ratio(timings)
    return Race(timings, {}, best, ratio, images=kind)


def _best_ratio(timings: Mapping[str, Timing]) -> tuple[str | None, Interval | None]:
    """The best of the framework's routes, and the plan's time by its."""
    best = best_of(timings, [name for name in timings if name not in OURS])
    if best is None or PLANTUNE not in timings:
        return best, None
    return best, ratio_interval(timings[PLANTUNE], timings[best])


def _reason(error: Exception) -> str:
    """In one line: what torch's compiler says goes on for pages."""
    if isinstance(error, PlantuneError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"[:1000]


@contextmanager
def _blaming(name: str) -> Iterator[None]:
    """What a GPU says of a fault names no kernel, and of memory that ran out nobody does."""
    try:
        yield
    except Exception as error:
        found = rejection(error)
        if found is None or found.stage not in ("crash", "memory"):
            raise
        raise WorkerDied(f"{name}: {first_line(error)}") from error
