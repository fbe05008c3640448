"""What a study found: as a table, as JSON and as bars."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phases import NAMES
from training import Trained
from variants import OURS

from plantune.report.tables import table

COLORS = {
    "data": "#999999",
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "optimizer": "#e69f00",
    "whole": "#009e73",
    "other": "#d0d0d0",
}


def row_of(trained: Trained, baseline: Trained | None) -> dict[str, Any]:
    """One variant, with how far its losses are from the baseline's."""
    total = sum(trained.ms.values()) if trained.ms else None
    row: dict[str, Any] = {
        "variant": trained.variant.name,
        "ms": trained.ms,
        "total_ms": total,
        "ragged_ms": trained.ragged_ms,
        "first_step_s": trained.first_step_s,
        "seconds": trained.seconds,
        "peak_mib": trained.peak_mib,
        "accuracy": trained.accuracy,
        "last_loss": last_loss(trained.losses),
        "losses": trained.losses,
    }
    if baseline is not None:
        row["accuracy_beside_baseline"] = trained.accuracy - baseline.accuracy
        row["loss_beside_baseline"] = _apart(trained.losses, baseline.losses)
        if total is not None and baseline.ms:
            row["of_baseline"] = total / sum(baseline.ms.values())
    return row


def last_loss(losses: Sequence[float]) -> float:
    """The mean of the last tenth."""
    return statistics.fmean(losses[-max(len(losses) // 10, 1) :])


def _apart(losses: Sequence[float], others: Sequence[float]) -> float:
    """The mean difference of two curves, as a part of what the second one is."""
    pairs = zip(losses, others, strict=True)
    return statistics.fmean(abs(a - b) for a, b in pairs) / max(statistics.fmean(others), 1e-9)


def shown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds of a step by phase; the phases and `other` are the total."""
    lines = [
        (
            row["variant"],
            *(_number(row["ms"].get(name)) for name in NAMES),
            *(_number(row["total_ms"]), _number(row.get("of_baseline"))),
            *(f"{row['last_loss']:.3f}", f"{100 * row['accuracy']:.1f} %"),
        )
        for row in rows
    ]
    headers = ("ms a step", *NAMES, "total", "of baseline", "loss", "accuracy")
    return table(headers, lines, "l" + "r" * (len(headers) - 1))


def shown_race(race: Mapping[str, Any]) -> str:
    lines = []
    for name, row in race["rows"].items():
        found = race["ratios"].get(name)
        text = "{ratio:.3f} ({low:.3f} to {high:.3f})".format(**found) if found else ""
        lines.append((name, _number(row["median_ms"]), text))
    headers = ("in turns", "ms a step", f"of {race['best_rival'] or 'nothing else'}")
    return table(headers, lines, "lrl")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def plotted(document: Mapping[str, Any], place: Path) -> None:
    """A bar for each variant, divided by phases. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    rows = [row for row in document["rows"] if row["ms"]][::-1]
    figure = Figure(figsize=(8, 1.2 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    lefts = [0.0] * len(rows)
    for name in NAMES:
        widths = [row["ms"].get(name, 0.0) for row in rows]
        axes.barh([*range(len(rows))], widths, left=lefts, color=COLORS[name], label=name)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.set_yticks([*range(len(rows))], [row["variant"] for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row["variant"] in OURS else "normal")
    axes.set_xlabel(f"ms a step of {document['batch']} images, {document['environment']['device']}")
    axes.set_title(f"{document['network']}, {document['precision']}")
    figure.legend(ncols=len(NAMES), fontsize="small", loc="outside lower center")
    figure.savefig(place, dpi=150)
