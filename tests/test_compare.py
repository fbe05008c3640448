"""tools/compare: plans of several databases, raced in one process."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from plantune.default_plans import COMPILED, default_plan, hand_plan
from plantune.machine import cpu_environment
from plantune.plan_db.database import PlanDatabase
from plantune.space.search_space import load_search_space
from plantune.workload import Workload

from .conftest import ROOT

NETWORK = Workload("resnet18", 1, image_size=32)


def test_the_slowest_plan_is_told_by_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, space = NETWORK.graph, load_search_space("cpu")
    plans = {
        "a.db": hand_plan(graph, space, network=NETWORK.network, without=COMPILED),
        "b.db": default_plan(graph, space, network=NETWORK.network),
    }
    paths = [str(tmp_path / name) for name in plans]
    for path, plan in zip(paths, plans.values(), strict=True):
        with PlanDatabase.open(Path(path)) as database:
            database.put_plan(plan, cpu_environment())
    asked = ["--model", "resnet18", "--batch", "1", "--image-size", "32", "--ways", "eager"]
    monkeypatch.setattr(sys, "argv", ["compare", *paths, *asked, "--budget", "0.1"])
    runpy.run_path(str(ROOT / "tools" / "compare"), run_name="__main__")
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["rows"]] == [
        *(f"plan {path}" for path in paths),
        *(f"plan {path}, frozen" for path in paths),
        "eager",
    ]
    live = sorted(row["median_ms"] for row in told["rows"][:2])
    assert told["spread"]["ratio"] == pytest.approx(live[1] / live[0], rel=1e-2)
    assert set(told["ratios"][f"plan {paths[0]}, frozen"]) == {"eager"}
    assert told["plans"][paths[1]]["families"].keys() <= {"framework", "view"}
