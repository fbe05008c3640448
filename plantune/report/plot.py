"""A benchmark as a bar plot; the one file that knows matplotlib."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plantune.base.files import require_replaceable, write_whole
from plantune.plans.written_words import BEST_ROUTE_OF_BENCH
from plantune.report.bench_text import NOISY, Unit, by_time, unit_of
from plantune.report.tables import machine_text

FORMATS = (".png", ".svg", ".pdf")
# Marks the images that later ones may replace.
MAKER = "plantune bench"
MAKER_KEYS = {"png": "Software", "svg": "Creator", "pdf": "Creator"}
# For queued and for single calls.
OURS_COLORS, OTHERS_COLORS = ("#0072b2", "#8fc1dd"), ("#b0b0b0", "#dcdcdc")
INK = "black"
QUARTILES, TAIL = ("low", "median", "high"), ("p50", "p50", "p99")
HEIGHT = 0.38  # of a bar; routes are 1 apart
# Whiskers end here, as a part of the longest bar: the slowest of a few calls may take a hundred
# times as long, and no bar could be seen beside that. What is cut off is written instead.
LONGEST_WHISKER = 1.25
# The width of the axis as a part of the longest that is drawn; labels of cut whiskers are longer.
ROOM, ROOM_BESIDE_CUT = 1.3, 1.4
HOW_TO_GET = "pip install 'plantune[plot]'"


def can_plot() -> bool:
    """Whether matplotlib is there; it is an optional extra."""
    return importlib.util.find_spec("matplotlib") is not None


def bar_plot(document: Mapping[str, Any], path: Path) -> None:
    """Draws a document of `plantune bench`: each route's queued calls with their quartiles and
    their part of the best route's, and beside it a single call until its result is there.
    """
    from matplotlib.figure import Figure

    rows = by_time(document)[::-1]
    figure = Figure(figsize=(9, 1.8 + 0.62 * len(rows)), layout="constrained")
    axes = figure.subplots()
    unit = unit_of(document)
    _draw(axes, document, rows, unit)
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows])
    axes.set_xlabel(_legend(document, unit))
    axes.set_xlim(0, unit.of(_width_ms(document)))
    axes.set_title(_title(document), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    image = io.BytesIO()
    kind = path.suffix.lower()[1:]
    figure.savefig(image, dpi=150, format=kind, metadata={MAKER_KEYS[kind]: MAKER})
    write_whole(path, image.getvalue())


def _draw(
    axes: Any, document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], unit: Unit
) -> None:
    """Two bars a route, the queued call above; a route without single calls has one."""
    medians = {row["name"]: row["median_ms"] for row in rows}
    best, end_ms = medians.get(document[BEST_ROUTE_OF_BENCH]), _end_ms(document)
    for place, row in enumerate(rows):
        single, median = _single(row, document), row["median_ms"]
        color, light = OURS_COLORS if row["name"].startswith("plantune") else OTHERS_COLORS
        up = HEIGHT / 2 if single else 0.0
        ratio = f" ({median / best:.3f})" if best else ""
        noisy = f" {NOISY}" if row.get("noisy") else ""
        label = f"{unit.text(median)} {unit.name}{ratio}{noisy}"
        bar = Bar([row[f"{q}_ms"] for q in QUARTILES], label)
        _bar(axes, place + up, bar, color, unit, end_ms)
        if single:
            label = f"{unit.text(single['p50'])} {unit.name} single"
            bar = Bar([single[p] for p in TAIL], label)
            _bar(axes, place - up, bar, light, unit, end_ms)


@dataclass(frozen=True)
class Bar:
    """A bar as long as the second of three times, with a whisker from the first to the third."""

    times_ms: Sequence[float]
    label: str


def _bar(axes: Any, place: float, bar: Bar, color: str, unit: Unit, end_ms: float) -> None:
    """A whisker beyond the end becomes an arrow with its value."""
    low, length, high = map(unit.of, bar.times_ms)
    end, label = unit.of(end_ms), bar.label
    whisker = [[length - low], [min(high, end) - length]]
    drawn = axes.barh(place, length, HEIGHT, xerr=whisker, color=color, capsize=3)
    if high > end:
        axes.plot([end], [place], ">", color=INK, markersize=6)
        label = f"{label}, to {f'{high:,.0f}' if high >= 100 else f'{high:.3g}'} {unit.name}"
    axes.bar_label(drawn, [label], padding=6)


def _end_ms(document: Mapping[str, Any]) -> float:
    """How far whiskers go: medians alone decide, which no single call can stretch."""
    rows = document["rows"]
    singles = [single["p50"] for row in rows if (single := _single(row, document))]
    return LONGEST_WHISKER * float(max(*(row["median_ms"] for row in rows), *singles, 0.0))


def _single(row: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, float]:
    """The percentiles of single calls on the headline's inputs; none if they were not timed."""
    found: Mapping[str, float] = row.get("latency_ms", {}).get(document.get("inputs", "same"), {})
    return found


def _legend(document: Mapping[str, Any], unit: Unit) -> str:
    text = f"{unit.name} a call in a row of calls, with quartiles (part of the best route's)"
    if any(row.get("latency_ms") for row in document["rows"]):
        text = f"{text}\nsingle: one call until its result is there, with the 99th percentile"
    if _is_cut(document):
        text = f"{text}\nan arrow: the whisker is cut off, and ends where its label says"
    return text


def _name(row: Mapping[str, Any]) -> str:
    promise = row.get("promise")
    return f"{row['name']}, {promise}" if promise else str(row["name"])


def _highest_ms(document: Mapping[str, Any]) -> float:
    """Where the longest whisker ends."""
    rows = document["rows"]
    highs = [row["high_ms"] for row in rows]
    highs += [single["p99"] for row in rows if (single := _single(row, document))]
    return float(max(highs))


def _width_ms(document: Mapping[str, Any]) -> float:
    if _is_cut(document):
        return ROOM_BESIDE_CUT * _end_ms(document)
    return ROOM * _highest_ms(document)


def _is_cut(document: Mapping[str, Any]) -> bool:
    """Whether a whisker is longer than is drawn."""
    return _highest_ms(document) > _end_ms(document)


def require_replaceable_plot(path: Path) -> None:
    """Raises ForeignFile if there is something else than an earlier plot."""
    require_replaceable(path, "a plot", lambda content: MAKER.encode() in content)


def _title(document: Mapping[str, Any]) -> str:
    work, here = document["workload"], document["environment"]
    what = f"{work['model']}, batch {work['batch']}, {work['mode']}, {work['dtype']}"
    if document.get("inputs") == "fresh":
        what = f"{what}, {document['inputs_in_turns']} inputs in turns"
    where = f"{machine_text(here)}, torch {here['torch']}"
    # Files from before 2026-11-22 do not say when they were measured.
    day = document.get("measured_at", "")[:10]
    return f"{what}\n{where}" + (f", {day}" if day else "")
