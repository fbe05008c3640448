"""tools/studies/recurrent: ways compute the same, a small study runs on the CPU and is written."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

TOOL = str(Path(__file__).parents[3] / "tools" / "studies" / "recurrent.py")


@pytest.fixture
def tool() -> dict[str, Any]:
    return runpy.run_path(TOOL)


def test_a_small_study_times_layers_and_a_policy(
    tool: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tool["in_turns"].__globals__, "ROUNDS", 1)
    monkeypatch.setitem(tool["timed"].__globals__, "CALLS", 1)
    given = tool["arguments"](["--small", "--out", str(tmp_path)])
    rows = tool["study"](given)
    whats = ("gru", "lstm", "policy acts", "policy learns")
    assert [(row.what, row.way) for row in rows] == [
        (what, way) for what in whats for way in ("plantune", "eager")
    ]
    written = json.loads((tmp_path / "recurrent_study.json").read_text())
    assert [row["us"] for row in written["rows"]] == [row.us for row in rows]
    assert written["environment"]["arch"] == "cpu"
    assert "policy learns" in tool["shown"](rows)
    pytest.importorskip("matplotlib")
    tool["plotted"](rows, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 1000


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_the_ways_of_a_layer_compute_the_same(tool: dict[str, Any], kind: str, mode: str) -> None:
    ways = tool["layer_ways"](kind, torch.float32, torch.device("cpu"), (3, 2, 24), mode)
    made = [run() for run in ways.values()]
    torch.testing.assert_close(*made, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_layers_are_timed_beside_cudnn(
    tool: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tool["in_turns"].__globals__, "ROUNDS", 2)
    rows = tool["study"](tool["arguments"](["--only", "layers", "--out", str(tmp_path)]))
    assert [(row.dtype, row.what, row.way) for row in rows] == [
        (dtype, what, way)
        for dtype in ("float16", "float32", "float32 with tf32")
        for what in ("gru", "lstm")
        for way in ("plantune", "cudnn")
    ]
    assert all(row.us > 0 for row in rows)
