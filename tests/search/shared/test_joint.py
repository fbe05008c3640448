"""Searches that share a study: each candidate is measured once, and all end with the same plan."""

from __future__ import annotations

import threading
import time
from collections import Counter
from itertools import count
from types import SimpleNamespace

import pytest

from plantune.base.canonical import canonical, digest
from plantune.base.outcome import Measured
from plantune.devices.machine import cpu_environment
from plantune.measure.racing.race import Race
from plantune.measure.timing import Timing, ratio_interval
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.problem import Problem
from plantune.search.results import Patience, SearchOptions
from plantune.search.session import Manner, search_plan
from plantune.search.shared.board_rows import TRIAL, rows_of
from plantune.search.shared.rdb import close_shared, opened_shared, with_driver
from plantune.search.sought import Sought

numbers = count()
TIMES = {"plantune": Timing((2.0,) * 9), "eager": Timing((3.0,) * 9)}
RACE = Race(TIMES, {}, "eager", ratio_interval(TIMES["plantune"], TIMES["eager"]))


class Measuring(SimpleNamespace):
    """A worker whose times follow from the candidate alone."""

    threads = limits = environment = None

    def __init__(self):
        super().__init__(asked=[], raced=[], on_stage=None)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def start(self, cut_at=None):
        pass

    def check_and_time(self, step, candidate, arch, effort=None, seeds=(0, 1)):
        time.sleep(0.01)
        self.asked.append((step.signature, candidate))
        drawn = digest([step.signature, canonical(candidate.to_json())])
        us = len(step.nodes) * (20.0 + int(drawn[:8], 16) % 50)
        return Measured(us, us, us, 9, 1e-7, 1e-6, True)

    def time_programs(self, graph, plans, effort, seed=0):
        return [Timing((4.0 + place,) * 5) for place in range(len(plans))]

    def rooflines(self, steps, arch):
        return [1.0] * len(steps)

    def race(self, raced, plan, routes, effort=None, seed=0):
        self.raced.append(tuple(routes or ()))
        return RACE


@pytest.fixture
def url(postgres):
    return with_driver(postgres.url)


@pytest.fixture
def search(tmp_path, monkeypatch, url, graph):
    """Runs a search in a thread, in a database of its own, where no plans are shipped."""
    for reader in ("plans.database.stored", "search.contenders.known"):
        monkeypatch.setattr(f"plantune.{reader}.data_folder", lambda name: tmp_path / name)
    workers = {}
    monkeypatch.setattr(
        "plantune.search.session.worker_for",
        lambda *problem, slot=None: workers[threading.current_thread().name],
    )
    found = {}
    problem = Problem.of(graph, "cpu", f"small_{next(numbers)}")

    def run(name, fresh):
        options = SearchOptions(120.0, storage=url, patience=Patience(2), fresh=fresh)
        sought = Sought(graph, problem)
        with PlanDatabase.open(tmp_path / f"{name}.db") as database:
            here = cpu_environment()
            result = search_plan(sought, options, database, here, Manner())
            found[name] = (result, database.find_plan(problem, here), workers[name])

    def start(name, *, fresh=False):
        workers[name] = Measuring()
        thread = threading.Thread(target=run, args=(name, fresh), name=name)
        thread.start()
        return thread

    return SimpleNamespace(start=start, found=found)


def outcomes(url):
    storage = opened_shared(url, Patience(2))
    try:
        id = max(study._study_id for study in storage.get_all_studies())
        rows = [row for row in rows_of(storage.get_all_trials(id)) if row.role == TRIAL]
        return Counter(key for row in rows for key, _ in row.reported)
    finally:
        close_shared(storage)


def test_two_searches_measure_each_candidate_once_and_end_with_one_plan(search, url):
    threads = [search.start("one", fresh=True), search.start("other")]
    for thread in threads:
        thread.join(300)
    (one, plan, first), (other, same, second) = search.found["one"], search.found["other"]
    assert plan.plan == same.plan == one.plan == other.plan
    assert sorted((one.elsewhere, other.elsewhere)) == [False, True]
    asked = Counter([*first.asked, *second.asked])
    assert max(asked.values()) == 1
    assert outcomes(url) == asked
    leader, proved = (second, first) if one.elsewhere else (first, second)
    assert proved.raced == [("eager",)]
    assert len(leader.raced) >= 1


def test_a_later_search_measures_nothing_again(search, url):
    search.start("first", fresh=True).join(300)
    search.start("later").join(300)
    assert search.found["first"][2].asked
    assert search.found["later"][2].asked == []
    assert not search.found["later"][0].elsewhere
