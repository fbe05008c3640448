"""The bar plot: one bar a route, ours in its own colour."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import pytest

from plantune.report.plot import bar_plot, can_plot

ROWS = [("plantune", 2.0, 1.9, 2.2), ("eager", 4.0, 3.9, 4.5), ("torchscript", 3.0, 3.0, 3.0)]
DOCUMENT: dict[str, Any] = {
    "environment": {"device": "A CPU", "threads": 1, "torch": "2.13.0"},
    "workload": {"model": "net", "batch": 8, "mode": "infer", "dtype": "float32"},
    "rows": [{"name": n, "median_ms": m, "low_ms": a, "high_ms": b} for n, m, a, b in ROWS],
    "best_baseline": "torchscript",
    "ratio": 0.667,
}

pytestmark = pytest.mark.skipif(not can_plot(), reason="matplotlib is an optional extra")


def test_a_png_is_written(tmp_path: Path) -> None:
    path = tmp_path / "näme.png"
    bar_plot(DOCUMENT, path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width > height > 300


def test_the_drawing_has_names_times_and_where_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    path = tmp_path / "bench.svg"
    bar_plot(DOCUMENT, path)
    drawn = path.read_text(encoding="utf-8")
    for words in ("plantune", "torchscript", "net, batch 8", "1 thread, torch"):
        assert words in drawn
    for words in ("2.00 ms (0.667)", "3.00 ms (1.000)", "4.00 ms (1.333)"):
        assert words in drawn
    assert drawn.count("#0072b2") == 1


def test_single_calls_the_date_and_noise_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    single = {"latency_ms": {"fresh": {"p50": 2.5, "p99": 3.5}}, "promise": "live"}
    rows = [{**row, **single, "noisy": row["name"] == "eager"} for row in DOCUMENT["rows"]]
    more = {"inputs": "fresh", "inputs_in_turns": 64, "measured_at": "2026-11-22T10:00:00+00:00"}
    path = tmp_path / "bench.svg"
    bar_plot({**DOCUMENT, **more, "rows": rows}, path)
    drawn = path.read_text(encoding="utf-8")
    for words in ("2.50 ms single", "eager, live", "64 inputs in turns", "2026-11-22"):
        assert words in drawn
    assert "4.00 ms (1.333) ~" in drawn
    assert "2.00 ms (0.667) ~" not in drawn


def drawn_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, p99: float) -> str:
    """The drawing where the slowest single calls of one route took so many ms."""
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    rows = [
        {**row, "latency_ms": {"same": {"p50": row["median_ms"], "p99": row["median_ms"]}}}
        for row in DOCUMENT["rows"]
    ]
    rows[1]["latency_ms"]["same"]["p99"] = p99
    path = tmp_path / "bench.svg"
    bar_plot({**DOCUMENT, "rows": rows}, path)
    return path.read_text(encoding="utf-8")


def longest_bar(drawn: str) -> float:
    """How wide the widest bar is, of the width of the whole drawing."""
    width = float(re.search(r'width="([\d.]+)pt"', drawn)[1])  # type: ignore[index]
    corners = re.findall(r'd="M ([\d.]+) [\d.]+ \nL ([\d.]+) [^"]*" clip-path', drawn)
    return max(abs(float(right) - float(left)) for left, right in corners) / width


def test_one_slow_call_does_not_stretch_the_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 99th percentile of 175 ms set the axis, and every bar of 2 to 4 ms vanished."""
    calm, disturbed = (drawn_with(tmp_path, monkeypatch, p99) for p99 in (4.4, 175.4))
    assert longest_bar(disturbed) > 0.8 * longest_bar(calm) > 0.2
    told = ("4.00 ms single, to 175 ms", "an arrow: the whisker is cut off")
    assert all(text in disturbed for text in told)
    assert not any(text in calm for text in told)


def test_a_search_path_without_matplotlib_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not can_plot()
