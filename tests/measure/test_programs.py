"""The cost of a pass, asked of a worker process."""

from __future__ import annotations

from plantune.base.outcome import Rejected
from plantune.measure import programs
from plantune.measure.programs import PassCost, pass_cost
from plantune.measure.worker import work
from plantune.measure.worker.client import Worker
from plantune.plans.guess import framework_plan
from plantune.plans.workload import Workload
from plantune.space.search_space import load_search_space

PROBLEM = Workload("se_resnet9_fixup", 1)
PLAN = framework_plan(PROBLEM.graph, load_search_space("cpu"), network=PROBLEM.network)


def test_a_worker_tells_it(copied_processes):
    with Worker() as worker:
        cost = worker.pass_cost(PROBLEM.graph, PLAN, 4)
    assert isinstance(cost, PassCost)
    assert cost.cpu.samples == 4
    assert cost.kernels == pass_cost(PROBLEM.graph, PLAN, 1).kernels > 20


def test_a_plan_that_has_no_room_is_rejected(monkeypatch):
    def full(*arguments):
        raise MemoryError("no room")

    monkeypatch.setattr(programs, "pass_cost", full)
    found = work.pass_cost(lambda stage: None, PROBLEM.graph, PLAN, 1, 0)
    assert found == Rejected("memory", "no room")
