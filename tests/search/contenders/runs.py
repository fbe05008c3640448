"""Runs of a search for tests of whole plans, with a worker that says what each of them takes."""

from __future__ import annotations

from plantune.errors import WorkerDied
from plantune.measure.timing import Timing
from plantune.plans.workload import Workload
from plantune.search.budget import Budget
from plantune.search.results import SearchOptions, silent
from plantune.search.run import Run
from plantune.search.sought import Sought


class FakeWorker:
    """Dies of some plans; times are their number."""

    def __init__(self, deadly=()):
        self.deadly = deadly
        self.asked = []
        self.efforts = []
        self.raced = None
        self.plans = []

    def time_programs(self, graph, plans, effort, seed=0):
        self.asked.append(list(plans))
        for plan in plans:
            if plan in self.deadly:
                raise WorkerDied(f"{plan}: an illegal memory access")
        return [Timing((float(len(plan)),) * 5) for plan in plans]

    def race(self, raced, plan, routes, effort, seed):
        self.raced = (raced.problem, routes)
        self.plans.append(plan)
        if plan in self.deadly:
            raise WorkerDied(f"{plan}: an illegal memory access")
        return "the race"


def run_of(worker, arch="cpu", seconds=1.0, **options):
    """The stages of a search whose steps do not count."""
    workload = Workload("se_resnet9_fixup", 1, arch=arch)
    sought = Sought(workload.graph, workload.problem)
    options = SearchOptions(**options)
    return Run(sought, options, worker, Budget(seconds), steps=None, report=silent)
