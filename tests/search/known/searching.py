"""Searches with a worker that says what each plan takes."""

from __future__ import annotations

from plantune.base.outcome import Measured
from plantune.devices.machine import cpu_environment
from plantune.measure.racing.race import Race
from plantune.measure.timing import Timing, ratio_interval
from plantune.plans.workload import Workload
from plantune.search.search import Search
from plantune.search.sought import Sought

HERE = cpu_environment()
PROBLEM, OTHER = Workload("se_resnet9_fixup", 1), Workload("se_resnet9_fixup", 2)
WIDE = (60.0, 140.0, 100.0, 75.0, 125.0, 90.0, 110.0, 100.0)


def search_of(workload, *arguments):
    return Search(Sought(workload.graph, workload.problem), *arguments)


def steady(us):
    return Timing(tuple(us * (1 + 0.001 * (i % 3)) for i in range(8)))


class FakeWorker:
    """A plan with oneDNN's convolutions takes `us`, one without 100; a candidate takes 10 us."""

    threads = limits = environment = None

    def __init__(self, us=50.0):
        self.us = us
        self.timed = []
        self.efforts = []
        self.races = []
        self.answers = []
        self.interrupt_after = None

    def start(self, until=None):
        pass

    def check_and_time(self, step, candidate, *arguments, **options):
        if self.interrupt_after is not None:
            raise KeyboardInterrupt
        return Measured(10.0, 10.0, 10.0, 9, 0.0, 1.0, True)

    def time_programs(self, graph, plans, effort, seed=0):
        self.timed.append(list(plans))
        self.efforts.append(effort)
        return [steady(self.time_of(plan)) for plan in plans]

    def time_of(self, plan):
        return self.us if "onednn_conv" in map(family, plan.choices) else 100.0

    def rooflines(self, steps, arch):
        return [1.0 + number for number in range(len(steps))]

    def race(self, raced, plan, routes, effort, seed):
        self.races.append((plan, routes))
        answer = self.answers.pop(0) if self.answers else {"plantune": self.us, "eager": 100.0}
        if isinstance(answer, Exception):
            raise answer
        timings = {n: Timing(WIDE) if t == "wide" else steady(t) for n, t in answer.items()}
        others = {n: t for n, t in timings.items() if n != "plantune"}
        best = min(others, key=lambda name: others[name].median_us)
        return Race(timings, {}, best, ratio_interval(timings["plantune"], timings[best]))


def family(choice):
    return choice.candidate.family


def choices(plan):
    return frozenset(plan.choices)
