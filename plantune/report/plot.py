"""A benchmark as a bar plot; the one file that knows matplotlib."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plantune.files import require_replaceable, write_whole
from plantune.report.bench_text import NOISY, Unit, by_time, unit_of
from plantune.report.tables import machine_text

FORMATS = (".png", ".svg", ".pdf")
# Marks the images that later ones may replace.
MAKER = "plantune bench"
MAKER_KEYS = {"png": "Software", "svg": "Creator", "pdf": "Creator"}
# For queued and for single calls.
OURS_COLORS, OTHERS_COLORS = ("#0072b2", "#8fc1dd"), ("#b0b0b0", "#dcdcdc")
QUARTILES, TAIL = ("low", "median", "high"), ("p50", "p50", "p99")
HEIGHT = 0.38  # of a bar; ways are 1 apart
HOW_TO_GET = "pip install 'plantune[plot]'"


def can_plot() -> bool:
    """Whether matplotlib is there; it is an optional extra."""
    return importlib.util.find_spec("matplotlib") is not None


def bar_plot(document: Mapping[str, Any], path: Path) -> None:
    """Draws a document of `plantune bench`: each way's queued calls with their quartiles and their
    part of the best baseline's, and beside it a single call until its result is there.
    """
    from matplotlib.figure import Figure

    rows = by_time(document)[::-1]
    figure = Figure(figsize=(9, 1.8 + 0.62 * len(rows)), layout="constrained")
    axes = figure.subplots()
    unit = unit_of(document)
    _draw(axes, document, rows, unit)
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows])
    axes.set_xlabel(_legend(document, unit))
    axes.set_xlim(0, 1.3 * unit.of(max(_longest(row, document) for row in rows)))
    axes.set_title(_title(document), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    image = io.BytesIO()
    kind = path.suffix.lower()[1:]
    figure.savefig(image, dpi=150, format=kind, metadata={MAKER_KEYS[kind]: MAKER})
    write_whole(path, image.getvalue())


def _draw(
    axes: Any, document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], unit: Unit
) -> None:
    """Two bars a way, the queued call above; a way without single calls has one."""
    kind = document.get("inputs", "same")
    medians = {row["name"]: row["median_ms"] for row in rows}
    best = medians.get(document["best_baseline"])
    for place, row in enumerate(rows):
        single, median = row.get("latency_ms", {}).get(kind), row["median_ms"]
        color, light = OURS_COLORS if row["name"].startswith("plantune") else OTHERS_COLORS
        up = HEIGHT / 2 if single else 0.0
        ratio = f" ({median / best:.3f})" if best else ""
        noisy = f" {NOISY}" if row.get("noisy") else ""
        label = f"{unit.text(median)} {unit.name}{ratio}{noisy}"
        _bar(axes, place + up, [unit.of(row[f"{q}_ms"]) for q in QUARTILES], color, label)
        if single:
            label = f"{unit.text(single['p50'])} {unit.name} single"
            _bar(axes, place - up, [unit.of(single[p]) for p in TAIL], light, label)


def _bar(axes: Any, place: float, times: Sequence[float], color: str, label: str) -> None:
    """A bar as long as the second of three times, with a whisker from the first to the third."""
    low, length, high = times
    whisker = [[length - low], [high - length]]
    bar = axes.barh(place, length, HEIGHT, xerr=whisker, color=color, capsize=3)
    axes.bar_label(bar, [label], padding=6)


def _legend(document: Mapping[str, Any], unit: Unit) -> str:
    text = f"{unit.name} a call in a row of calls, with quartiles (part of the best baseline's)"
    if any(row.get("latency_ms") for row in document["rows"]):
        text = f"{text}\nsingle: one call until its result is there, with the 99th percentile"
    return text


def _name(row: Mapping[str, Any]) -> str:
    promise = row.get("promise")
    return f"{row['name']}, {promise}" if promise else str(row["name"])


def _longest(row: Mapping[str, Any], document: Mapping[str, Any]) -> float:
    single = row.get("latency_ms", {}).get(document.get("inputs", "same"), {})
    return max(float(row["high_ms"]), float(single.get("p99", 0.0)))


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
