"""A benchmark for people: what runs and how fast, how sure that is, and tables of all routes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plantune.plans.raced_routes import has_compiled
from plantune.plans.standing import EAGER, Standing
from plantune.plans.written_words import BEST_LIVE_ROUTE_OF_BENCH, BEST_ROUTE_OF_BENCH
from plantune.report.tables import counted, table

if TYPE_CHECKING:
    from plantune.measure.racing.race import Race

NOISY = "~"
NOISE = f"{NOISY} noisy: the quartiles are far apart, or other work ran on these cores"
# With fewer calls, the 99th percentile is just the slowest one.
ENOUGH_CALLS = 100
FEW = "p99 is the slowest of {} calls here; a larger --budget times more"
DIGITS = 3
# A budget for a race that the first one left undecided.
LONGER = 6
INPUTS = {"same": "the same input in each call", "fresh": "{} inputs in turns"}


def standing_of(race: Race, route: str) -> Standing:
    """How the plan compared in this race; `route` is who runs it, in the race too."""
    from plantune.measure.racing.built_routes import PLANTUNE
    from plantune.measure.timing import in_common, ratio_interval

    ours, eager = race.timings.get(PLANTUNE), race.timings.get(EAGER)
    beside_eager = None
    if ours is not None and eager is not None:
        beside_eager = ratio_interval(*in_common(ours, eager))
    best = None
    if race.best_route is not None and race.ratio is not None:
        best = (race.best_route, race.ratio)
    caveat = None if has_compiled(race.timings) else "torch.compile was not in this race"
    return Standing(route, beside_eager, best, caveat=caveat, as_it_runs=True)


def headline(race: Race, route: str) -> str:
    """What runs the network and how fast, in one sentence."""
    return standing_of(race, route).headline("no other route ran beside it")


def details(race: Race, route: str) -> list[str]:
    """The numbers of the headline, with their intervals."""
    lines = standing_of(race, route).details() if race.ratio is not None else []
    rounds = min((timing.samples for timing in race.timings.values()), default=0)
    if any(timing.cut_short for timing in race.timings.values()):
        lines.append(f"the time was up after {counted(rounds, 'round')}")
    return lines


def advice(document: Mapping[str, Any], race: Race, budget_s: float) -> list[str]:
    """What disturbed the race, and how to get a better one where it decided nothing."""
    reason = document["machine"]["disturbed_by"]
    lines = [f"the machine was not quiet: {reason}"] if reason else []
    if race.ratio is not None and race.ratio.is_undecided:
        best = dict.fromkeys(filter(None, (race.best_route, document[BEST_LIVE_ROUTE_OF_BENCH])))
        longer = f"--budget {LONGER * budget_s:g} --peers {','.join(best)}"
        lines.append(f"measure again when nothing else runs, or longer with fewer routes: {longer}")
    return lines


def other_ratios(document: Mapping[str, Any]) -> list[str]:
    """The ratios next to the headline: both kinds of inputs, the best live route, ours frozen."""
    lines = [
        f"{INPUTS[kind].format(document['inputs_in_turns'])}: {found['ratio']:.3f} of "
        f"{found[BEST_ROUTE_OF_BENCH]}'s time"
        for kind, found in document["ratios"].items()
    ]
    live, best = document[BEST_LIVE_ROUTE_OF_BENCH], document[BEST_ROUTE_OF_BENCH]
    if live not in (None, best):
        ratio = f"{document['ratio_live']:.3f} of {live}'s time"
        lines.append(f"{best} is frozen; against the best live route: {ratio}")
    apart = document.get("training_beside_inference")
    if apart is not None:
        lines.append(f"outputs of training and inference differ by {apart:.2g} of the largest")
    times = {row["name"]: row["median_ms"] for row in document["rows"]}
    if "plantune-frozen" in times and best is not None:
        lines.append(
            f"with frozen=True: {times['plantune-frozen'] / times[best]:.3f} of {best}'s time"
        )
    return lines


class Unit:
    """Milliseconds or microseconds, with equal digits: three of the shortest time."""

    def __init__(self, times_ms: Sequence[float]) -> None:
        shortest = min((ms for ms in times_ms if ms > 0), default=1.0)
        self.name, self._factor = ("ms", 1.0) if shortest >= 1 else ("us", 1e3)
        whole = math.floor(math.log10(shortest * self._factor)) + 1
        self._decimals = max(DIGITS - whole, 0)

    def of(self, ms: float) -> float:
        return ms * self._factor

    def text(self, ms: float | None) -> str:
        return "-" if ms is None else f"{self.of(ms):.{self._decimals}f}"


def unit_of(document: Mapping[str, Any]) -> Unit:
    return Unit([row["median_ms"] for row in document["rows"]])


def queued_table(document: Mapping[str, Any], width: int | None = None) -> str:
    """Calls in a row, the fastest route first, each as a part of the best route's time."""
    unit, rows = unit_of(document), by_time(document)
    best = next((r["median_ms"] for r in rows if r["name"] == document[BEST_ROUTE_OF_BENCH]), None)
    weighed = any(row.get("peak_mib") is not None for row in rows)
    lines = [
        [
            row["name"],
            row.get("promise", "-"),
            *(unit.text(row.get("queued_ms", {}).get(kind)) for kind in ("same", "fresh")),
            f"{unit.text(row['low_ms'])} to {unit.text(row['high_ms'])}",
            f"{row['median_ms'] / best:.3f}" if best else "-",
            *([_mib(row["peak_mib"])] if weighed else []),
            NOISY if row["noisy"] else "",
        ]
        for row in rows
    ]
    titles = ["route", "weights", f"same, {unit.name}", "fresh", "quartiles", "of best"]
    titles += [*(["peak, MiB"] if weighed else []), ""]
    noise = [NOISE] if any(row["noisy"] for row in rows) else []
    align = "ll" + "r" * (len(titles) - 3) + "l"
    return "\n".join([table(titles, lines, align, width), *noise])


def _mib(peak: float | None) -> str:
    return "-" if peak is None else f"{peak:.0f}"


def parts_table(document: Mapping[str, Any], width: int | None = None) -> str | None:
    """What the parts of a call in training take; None if no route's are known."""
    rows = [row for row in by_time(document) if row.get("phases_ms")]
    if not rows:
        return None
    unit, names = unit_of(document), [*rows[0]["phases_ms"]]
    lines = [
        [row["name"], *(unit.text(row["phases_ms"][n]) for n in names), unit.text(row["median_ms"])]
        for row in rows
    ]
    titles = [f"phases, {unit.name}", *names, "whole"]
    return table(titles, lines, "l" + "r" * (len(titles) - 1), width)


def single_table(document: Mapping[str, Any], width: int | None = None) -> str | None:
    """Single calls until their result is there, what they take of host and GPU, and what it costs
    to be ready; None for a race that did not time them.
    """
    rows = [row for row in by_time(document) if row.get("latency_ms")]
    if not rows:
        return None
    unit, sides = unit_of(document), any(row["gpu_ms"] is not None for row in rows)
    lines = [
        [
            row["name"],
            *(unit.text(row["latency_ms"][kind][p]) for kind in KINDS for p in ("p50", "p99")),
            *((unit.text(row["host_ms"]), unit.text(row["gpu_ms"])) if sides else ()),
            _ready_text(row),
            "-" if row["paid_after_calls"] is None else str(row["paid_after_calls"]),
        ]
        for row in rows
    ]
    titles = ["single calls", f"p50, {unit.name}", "p99", "fresh p50", "p99"]
    titles += [*(["host", "GPU"] if sides else []), "ready in", "paid after"]
    fewest = min(row["latency_ms"][kind]["calls"] for row in rows for kind in KINDS)
    notes = [FEW.format(fewest)] if fewest < ENOUGH_CALLS else []
    return "\n".join([table(titles, lines, "l" + "r" * (len(titles) - 1), width), *notes])


KINDS = ("same", "fresh")


def _ready_text(row: Mapping[str, Any]) -> str:
    """Seconds to build, and to search for it before."""
    searched = f" + {row['search_s']:.0f}" if row["search_s"] else ""
    return f"{row['build_s']:.1f}{searched} s" + (" (cached)" if row["build_cached"] else "")


def by_time(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sorted(document["rows"], key=lambda row: float(row["median_ms"]))
