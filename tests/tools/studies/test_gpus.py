"""tools/studies/gpus.py: plans race in several makes, as memory alone changes the time of one."""

from __future__ import annotations

import runpy
from dataclasses import replace
from types import SimpleNamespace

import pytest

from plantune.measure.timing import Timing
from plantune.plans.guess import framework_plan
from plantune.plans.workload import Workload
from plantune.space.search_space import load_search_space

from ...conftest import ROOT


class Worker:
    """A make of the first plan is slow once."""

    def __init__(self):
        self.efforts = []

    def time_programs(self, graph, plans, effort):
        self.efforts.append(effort.budget_s)
        first = 120.0 if len(self.efforts) == 1 else 100.0
        return [Timing((us,) * 3) for us in (first, 110.0)]


def test_a_make_that_is_slow_decides_nothing():
    tool = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "studies" / "gpus.py")))
    workload = Workload("se_resnet9_fixup", 1, image_size=16)
    plan = framework_plan(workload.graph, load_search_space("cpu"), network=workload.network)
    other, worker = replace(plan, branches=True), Worker()
    runs = [tool.Found(1.0, {}, (plan, other)), tool.Found(1.0, {}, (other,))]
    (first, ours), (second, theirs) = tool.race(workload.graph, worker, runs)
    assert (first, second) == (plan, other)
    assert (ours.median_us, theirs.median_us) == (100.0, 110.0)
    assert ours.samples == theirs.samples == 3 * tool.MAKES
    assert sum(worker.efforts) == pytest.approx(tool.RACE_S)
