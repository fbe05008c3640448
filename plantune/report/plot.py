"""A benchmark as a bar plot; the one file that knows matplotlib."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plantune.files import require_replaceable, write_whole
from plantune.report.tables import machine_text

FORMATS = (".png", ".svg", ".pdf")
# Marks the images that later ones may replace.
MAKER = "plantune bench"
MAKER_KEYS = {"png": "Software", "svg": "Creator", "pdf": "Creator"}
OURS, OTHERS = "#0072b2", "#b0b0b0"
HOW_TO_GET = "pip install 'plantune[plot]'"


def can_plot() -> bool:
    """Whether matplotlib is there; it is an optional extra."""
    return importlib.util.find_spec("matplotlib") is not None


def bar_plot(document: Mapping[str, Any], path: Path) -> None:
    """Draws a document of `plantune bench`: medians as bars, quartiles as whiskers."""
    from matplotlib.figure import Figure

    rows = sorted(document["rows"], key=lambda row: -float(row["median_ms"]))
    names = [row["name"] for row in rows]
    medians = [row["median_ms"] for row in rows]
    whiskers = (
        [row["median_ms"] - row["low_ms"] for row in rows],
        [row["high_ms"] - row["median_ms"] for row in rows],
    )
    figure = Figure(figsize=(8, 1.6 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    colors = [OURS if name == "plantune" else OTHERS for name in names]
    bars = axes.barh(names, medians, xerr=whiskers, color=colors, capsize=3)
    labels = [f"{median:.3g} ms" for median in medians]
    axes.bar_label(bars, labels, padding=6)
    axes.set_xlabel("ms per call: median, quartiles")
    axes.set_xlim(0, 1.2 * max(row["high_ms"] for row in rows))
    axes.set_title(_title(document), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    image = io.BytesIO()
    kind = path.suffix.lower()[1:]
    figure.savefig(image, dpi=150, format=kind, metadata={MAKER_KEYS[kind]: MAKER})
    write_whole(path, image.getvalue())


def require_replaceable_plot(path: Path) -> None:
    """Raises ForeignFile if something else than an earlier plot lies there."""
    require_replaceable(path, "a plot", lambda content: MAKER.encode() in content)


def _title(document: Mapping[str, Any]) -> str:
    work, here = document["workload"], document["environment"]
    what = f"{work['model']}, batch {work['batch']}, {work['mode']}, {work['dtype']}"
    where = f"{machine_text(here)}, torch {here['torch']}"
    return f"{what}\n{where}"
