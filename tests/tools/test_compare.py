"""tools/compare: plans of several databases, raced in one process."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import pytest

from plantune.base.canonical import Attrs
from plantune.devices.machine import cpu_environment
from plantune.measure.timing import Timing, ratio_interval
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.guess import COMPILED, framework_plan, hand_plan
from plantune.plans.workload import Workload
from plantune.space.search_space import load_search_space

from ..conftest import ROOT

NETWORK = Workload("se_resnet9_fixup", 1, image_size=16)


def test_the_slowest_plan_is_told_by_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, space = NETWORK.graph, load_search_space("cpu")
    plans = {
        "a.db": hand_plan(graph, space, network=NETWORK.network, without=COMPILED),
        "b.db": framework_plan(graph, space, network=NETWORK.network),
    }
    paths = [str(tmp_path / name) for name in plans]
    for path, plan in zip(paths, plans.values(), strict=True):
        with PlanDatabase.open(Path(path)) as database:
            database.put_plan(plan, cpu_environment())
    asked = ["--batch", "1", "--image-size", "16", "--ways", "eager"]
    monkeypatch.setattr(
        sys, "argv", ["compare", *paths, *asked, "--budget", "0.05", "--makes", "2"]
    )
    runpy.run_path(str(ROOT / "tools" / "compare"), run_name="__main__")
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["rows"]] == [
        *(f"plan {path}" for path in paths),
        *(f"plan {path}, frozen" for path in paths),
        "eager",
    ]
    live = sorted(row["median_ms"] for row in told["rows"][:2])
    assert told["spread"]["ratio"] == pytest.approx(live[1] / live[0], rel=1e-2)
    for row in told["rows"]:
        assert min(row["makes_ms"]) <= row["median_ms"] <= max(row["makes_ms"])
        assert len(row["makes_ms"]) == 2
    assert [told["plans"][path]["like"] for path in paths] == [[], []]
    assert set(told["ratios"][f"plan {paths[0]}, frozen"]) == {"eager"}
    assert told["plans"][paths[1]]["families"].keys() <= {"framework", "view"}


def test_a_slow_phase_of_the_machine_changes_no_ratio() -> None:
    """All took 1.7 times as long while one make ran, and half of the time while the other did."""
    tool = runpy.run_path(str(ROOT / "tools" / "compare"))
    paces = [[1.7] * 6, [1.0] * 3 + [1.7] * 3]
    takes = {"plan": (100.0, 104.0), "route": (200.0, 200.0), "other": (150.0, 150.0)}
    makes = {
        name: [Timing(tuple(us * p for p in pace)) for us, pace in zip(each, paces, strict=True)]
        for name, each in takes.items()
    }
    for each in makes.values():
        each[0] = replace(each[0], samples_us=(*each[0].samples_us, 1.0))  # it had a round more
    found = tool["on_even_speed"](makes)
    medians = {name: [timing.median_us for timing in each] for name, each in found.items()}
    plan, route = (medians[name] for name in ("plan", "route"))
    assert [a / b for a, b in zip(plan, route, strict=True)] == pytest.approx([0.5, 0.52])
    assert route[0] == pytest.approx(route[1])
    assert [timing.samples for timing in found["plan"]] == [6, 6]


def test_a_make_with_few_rounds_costs_the_others_none() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "compare"))
    takes = {"plan": 100.0, "route": 200.0}
    counts = (5, 30, 20, 80)
    makes = {name: [Timing((us,) * count) for count in counts] for name, us in takes.items()}
    found = tool["on_even_speed"](makes)
    for name, us in takes.items():
        assert [each.samples_us for each in found[name]] == [(us,) * n for n in (5, 20, 20, 20)]
        assert tool["whole"](found[name]).samples == 65


def test_the_interval_knows_that_rounds_of_one_make_are_alike() -> None:
    """Each make of a plan is off by 2.5 %, whatever its rounds say, which seem to be sure."""
    tool, random = runpy.run_path(str(ROOT / "tools" / "compare")), Random(4)
    tool["ratio"].__globals__["RESAMPLES"] = 80  # as runpy has it: the tool's own

    def made(us: float, apart: float) -> list[Timing]:
        means = [us * random.lognormvariate(0, apart) for _ in range(6)]
        return [
            Timing(tuple(mean * random.uniform(0.97, 1.03) for _ in range(8))) for mean in means
        ]

    held, apart, alone = 0, [], []
    for _ in range(60):
        ours, theirs = made(80, 0.025), made(100, 0.0)
        found = tool["ratio"](ours, theirs)
        held += found["low"] <= 0.8 <= found["high"]
        apart.append(found["high"] / found["low"] - 1)
        rounds = ratio_interval(tool["whole"](ours), tool["whole"](theirs), resamples=80)
        alone.append(rounds.high / rounds.low - 1)
    assert held >= 50
    assert median(apart) > 1.3 * median(alone)
    assert found["ratio"] == pytest.approx(rounds.ratio, abs=1e-4)


def test_plans_that_choose_the_same_are_alike_whatever_they_measured() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "compare"))
    plan = framework_plan(NETWORK.graph, load_search_space("cpu"), network=NETWORK.network)
    again = replace(plan, choices=plan.choices[::-1], evidence=Attrs(ratio=0.5))
    traced = replace(plan, route="torchscript-traced")
    plans = {"plan": plan, "again": again, "traced": traced}
    found = {name: tool["told_of_plan"](each, plans)["like"] for name, each in plans.items()}
    assert found == {"plan": ["again"], "again": ["plan"], "traced": []}
