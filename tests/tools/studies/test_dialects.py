"""tools/studies/dialects: a small study runs on the CPU, and its ratios follow from its rounds."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

TOOL = str(Path(__file__).parents[3] / "tools" / "studies" / "dialects.py")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = runpy.run_path(TOOL)
    monkeypatch.setitem(found["timed"].__globals__, "ROUNDS", 2)
    monkeypatch.setitem(found["timed"].__globals__, "ROUND_S", 0)
    return found


@pytest.mark.parametrize(
    ("work", "dialect"), [("infer", "float32"), ("train", "autocast-bfloat16"), ("step", "float32")]
)
def test_a_small_study(tool: dict[str, Any], work: str, dialect: str) -> None:
    rivals = [("eager", "nchw"), ("eager", "nhwc"), ("cuda-graph", "nhwc")]
    found = tool["measured"]("se_resnet9_fixup", dialect, work, 2, rivals, None)
    assert set(found["us"]) == {f"{r} {n}" for r in ("plantune", "eager") for n in ("nchw", "nhwc")}
    assert set(found["failures"]) == {"cuda-graph nhwc"}
    assert found["ratio nchw"] > 0
    if work != "step":
        assert found["error_ratio"] < 2.5
    assert found["best_rival"] in tool["shown"](found)


def test_the_best_rival_is_compared_round_by_round(tool: dict[str, Any]) -> None:
    times = {
        "plantune nchw": [3.0, 4.0, 5.0],
        "plantune nhwc": [1.0, 1.0, 2.0],
        "eager nchw": [9.0, 9.0, 9.0],
        "compile-default nhwc": [4.0, 8.0, 4.0],
    }
    found = tool["judged"](times)
    assert found["best_rival"] == "compile-default nhwc"
    assert (found["ratio nchw"], found["ratio nhwc"]) == (0.75, 0.25)


def test_an_error_is_the_largest_of_both_layouts(tool: dict[str, Any]) -> None:
    exact = [torch.ones(4, dtype=torch.float64)]
    calls = {
        "plantune nchw": lambda: torch.full((4,), 1.25),
        "plantune nhwc": lambda: torch.full((4,), 1.5),
        "eager nchw": lambda: torch.full((4,), 1.125),
        "compile-default nchw": lambda: torch.full((4,), 9.0),
    }
    assert tool["compared"](calls, exact)["error_ratio"] == 4
