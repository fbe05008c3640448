"""A race as the JSON document of `plantune bench`, as a table, and in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plantune.report.tables import table
from plantune.rivals import has_compiled

if TYPE_CHECKING:
    from plantune.environment import Environment
    from plantune.measure.race import Race


def bench_document(
    race: Race, environment: Environment, workload: Mapping[str, Any]
) -> dict[str, Any]:
    """All rows are medians and quartiles of one interleaved run.

    `peak_mib` is what a way takes of a GPU's memory, weights included. On a CPU it is null: all
    ways run in one process, and what each takes of its memory cannot be told apart.
    """
    rows = [
        {
            "name": name,
            "median_ms": timing.median_us / 1e3,
            "low_ms": timing.low_us / 1e3,
            "high_ms": timing.high_us / 1e3,
            "peak_mib": race.peaks_mib.get(name),
        }
        for name, timing in race.timings.items()
    ]
    return {
        "environment": environment.to_json(),
        "workload": dict(workload),
        "rows": rows,
        "best_baseline": race.best_baseline,
        "ratio": None if race.ratio is None else race.ratio.ratio,
    }


def bench_table(document: Mapping[str, Any], width: int | None = None) -> str:
    """The fastest way first, each with its time as a part of the best baseline's."""
    rows = sorted(document["rows"], key=lambda row: float(row["median_ms"]))
    best = next((r["median_ms"] for r in rows if r["name"] == document["best_baseline"]), None)
    lines = [
        [
            row["name"],
            f"{row['median_ms']:.3f}",
            f"{row['low_ms']:.3f} to {row['high_ms']:.3f}",
            f"{row['median_ms'] / best:.3f}" if best else "-",
        ]
        for row in rows
    ]
    return table(["way", "median ms", "quartiles", "of best baseline"], lines, "lrrr", width)


def verdict(race: Race) -> str:
    """Who won, and how sure that is."""
    if race.ratio is None:
        return "there is nothing to compare: no baseline ran beside the plan"
    ratio, name = race.ratio, race.best_baseline
    interval = f"{ratio.ratio:.3f} of {name}'s time ({interval_text(ratio)})"
    if not has_compiled(race.timings):
        interval = f"{interval}; torch.compile was not in this race"
    if ratio.high < 1:
        return f"plantune is faster: {interval}"
    if ratio.low > 1:
        return f"plantune is slower: {interval}"
    return f"a tie within the noise: {interval}"


def interval_text(interval: Any) -> str:
    return f"{100 * interval.confidence:.0f} % interval {interval.low:.3f} to {interval.high:.3f}"
