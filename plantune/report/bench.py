"""A race as the JSON document of `plantune bench`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from plantune.measure.racing.built_routes import PLANTUNE
from plantune.measure.racing.race import FRESH, OURS, SAME, best_of
from plantune.measure.racing.routes import LIVE
from plantune.measure.timing import ratio_interval
from plantune.plans.written_words import BEST_LIVE_ROUTE_OF_BENCH, BEST_ROUTE_OF_BENCH

if TYPE_CHECKING:
    from plantune.devices.machine import Environment
    from plantune.measure.machine_state import State
    from plantune.measure.racing.race import Detail, Race
    from plantune.measure.timing import Timing
    from plantune.plans.verdict import Interval

# Samples kept per route and kind of timing, spread evenly over the run.
SAMPLES_KEPT = 60
SAMPLE_DIGITS = 5
EAGER = "eager"


def bench_document(
    race: Race,
    environment: Environment,
    workload: Mapping[str, Any],
    *,
    search_s: float | None = None,
    machine: State | None = None,
) -> dict[str, Any]:
    """All rows are medians and quartiles of one interleaved run, on the inputs of the headline.

    `peak_mib` is what a route takes of a GPU's memory, weights included. On a CPU it is null: all
    routes run in one process, and what each takes of its memory cannot be told apart. `search_s` is
    what the plan's search took, null of plans that came with it. `machine` is what else happened
    while the routes were built and timed, if somebody looked.
    """
    return {
        "environment": environment.to_json(),
        "workload": dict(workload),
        "rows": [_row(race, name, search_s) for name in race.timings],
        BEST_ROUTE_OF_BENCH: race.best_route,
        "ratio": None if race.ratio is None else race.ratio.ratio,
        "interval": _interval(race.ratio),
        "inputs": race.images,
        "inputs_in_turns": race.in_turns,
        **_live(race),
        "ratios": _by_inputs(race),
        "training_beside_inference": race.difference,
        "failures": dict(race.failures),
        "sm_mhz": _clocks(race.clocks_mhz),
        "machine": {
            "state": None if machine is None else machine.word,
            "disturbed_by": None if machine is None else machine.reason or None,
        },
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def live_ratio(race: Race) -> tuple[str, Interval] | None:
    """The best of the framework's routes that keeps the same promise, and the ratio to it."""
    names = [n for n, detail in race.details.items() if detail.promise == LIVE and n not in OURS]
    best = best_of(race.timings, names)
    if best is None or PLANTUNE not in race.timings:
        return None
    return best, ratio_interval(race.timings[PLANTUNE], race.timings[best])


def _live(race: Race) -> dict[str, Any]:
    name, ratio = live_ratio(race) or (None, None)
    return {
        BEST_LIVE_ROUTE_OF_BENCH: name,
        "ratio_live": None if ratio is None else ratio.ratio,
        "interval_live": _interval(ratio),
    }


def _by_inputs(race: Race) -> dict[str, Any]:
    """The ratio to the best of the framework's routes on either kind of inputs; the headline is the
    worse.
    """
    ratios: dict[str, Any] = {}
    for kind in (SAME, FRESH) if PLANTUNE in race.details else ():
        queued = {n: d.queued[kind] for n, d in race.details.items() if kind in d.queued}
        best = best_of(queued, [name for name in queued if name not in OURS])
        if best is not None:
            ratio = queued[PLANTUNE].median_us / queued[best].median_us
            ratios[kind] = {BEST_ROUTE_OF_BENCH: best, "ratio": ratio}
    return ratios


def _row(race: Race, name: str, search_s: float | None) -> dict[str, Any]:
    timing, detail = race.timings[name], race.details.get(name)
    row = {
        "name": name,
        "median_ms": timing.median_us / 1e3,
        "low_ms": timing.low_us / 1e3,
        "high_ms": timing.high_us / 1e3,
        "peak_mib": race.peaks_mib.get(name),
        "interval_ms": [us / 1e3 for us in timing.interval_us],
        "noisy": timing.noisy,
    }
    return row if detail is None else {**row, **_details(race, name, detail, search_s)}


def _details(race: Race, name: str, detail: Detail, search_s: float | None) -> dict[str, Any]:
    searched_s, latency = search_s if name in OURS else None, detail.latency.items()
    return {
        "promise": detail.promise,
        "queued_ms": {kind: t.median_us / 1e3 for kind, t in detail.queued.items()},
        "latency_ms": {
            kind: {"p50": t.median_us / 1e3, "p99": t.percentile_us(99) / 1e3, "calls": t.samples}
            for kind, t in latency
        },
        "host_ms": _ms(detail.host_us),
        "gpu_ms": _ms(detail.gpu_us),
        "phases_ms": _parts(detail, race.timings[name]),
        "static_input": detail.static,
        "build_s": round(detail.build_s, 3),
        "build_cached": detail.cached,
        "search_s": searched_s,
        "paid_after_calls": _paid_after(race, name, detail.build_s + (searched_s or 0.0)),
        "samples_us": {
            "queued": {kind: _kept(timing) for kind, timing in detail.queued.items()},
            "latency": {kind: _kept(timing) for kind, timing in latency},
        },
    }


def _parts(detail: Detail, timing: Timing) -> dict[str, float] | None:
    """With what a call takes beside its parts, so that they add up; None if none are known."""
    if not detail.parts_us:
        return None
    parts = {name: us / 1e3 for name, us in detail.parts_us.items()}
    return {**parts, "other": timing.median_us / 1e3 - sum(parts.values())}


def _paid_after(race: Race, name: str, spent_s: float) -> int | None:
    """After how many calls a route has saved the time that it took until it was ready, beside
    eager; None if it never does.
    """
    if EAGER not in race.details or name == EAGER:
        return None
    saved_us = race.timings[EAGER].median_us - race.timings[name].median_us
    if saved_us <= 0:
        return None
    more_s = max(spent_s - race.details[EAGER].build_s, 0.0)
    return math.ceil(more_s * 1e6 / saved_us)


def _kept(timing: Timing) -> list[float]:
    """Samples in their order, evenly over the run."""
    step = -(-timing.samples // SAMPLES_KEPT)
    return [float(f"{us:.{SAMPLE_DIGITS}g}") for us in timing.samples_us[::step]]


def _clocks(mhz: Sequence[int]) -> dict[str, float] | None:
    return {"low": min(mhz), "median": statistics.median(mhz), "high": max(mhz)} if mhz else None


def _interval(found: Interval | None) -> dict[str, float] | None:
    if found is None:
        return None
    return {"low": found.low, "high": found.high, "confidence": found.confidence}


def _ms(us: float | None) -> float | None:
    return None if us is None else us / 1e3
