"""What a search keeps: the plan that calls use, and the nearest known one, unless one is faster."""

from __future__ import annotations

import pytest

from plantune.errors import WorkerDied
from plantune.measure.timing import Timing
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.workload import Workload
from plantune.search import policy
from plantune.search.contenders import affordable
from plantune.search.results import SearchOptions
from plantune.search.step_search import StepSearch

from .searching import HERE, OTHER, PROBLEM, WIDE, choices, search_of, steady


class TestKept:
    def test_a_better_plan_is_never_replaced_by_a_worse_one(
        self, searched, worker, database, by_hand, monkeypatch
    ):
        database.put_plan(by_hand(PROBLEM), HERE)
        monkeypatch.setattr(
            worker, "time_of", lambda plan: 50.0 if choices(plan) == kept else 50.02
        )
        kept = choices(by_hand(PROBLEM))
        assert choices(searched().plan) == kept

    def test_not_even_by_one_that_may_be_better(
        self, searched, worker, database, by_hand, monkeypatch
    ):
        database.put_plan(by_hand(PROBLEM), HERE)
        kept = choices(by_hand(PROBLEM))

        def timed(graph, plans, effort, seed=0):
            return [Timing(WIDE) if choices(p) == kept else steady(99.0) for p in plans]

        monkeypatch.setattr(worker, "time_programs", timed)
        assert choices(searched().plan) == kept

    def test_it_stays_where_there_is_no_time_to_compare_it(
        self, worker, uncommon, monkeypatch, tmp_path
    ):
        kept = choices(uncommon(PROBLEM))
        monkeypatch.setattr(StepSearch, "run", lambda steps, budget, report: None)
        monkeypatch.setattr(
            affordable, "building_s", lambda plan, *others: 1e9 if choices(plan) == kept else 0.0
        )
        with PlanDatabase.open(tmp_path / "plans.db") as database:
            database.put_plan(uncommon(PROBLEM), HERE)
            result = search_of(PROBLEM, SearchOptions(30.0), database, HERE).run(worker)
            assert (choices(result.plan), result.race, worker.races) == (kept, None, [])
            assert len(list(database.plans())) == 1

    def test_one_that_is_better_beyond_doubt_takes_its_place(
        self, searched, worker, database, by_hand, monkeypatch
    ):
        database.put_plan(by_hand(PROBLEM), HERE)
        kept = choices(by_hand(PROBLEM))
        monkeypatch.setattr(worker, "time_of", lambda plan: 50.0 if choices(plan) == kept else 40.0)
        assert choices(searched().plan) != kept


class TestPreferred:
    """A short search times plans for few rounds, and one of eight is lucky: what a longer one found
    elsewhere is worth more.
    """

    @pytest.mark.parametrize(("others_us", "stays"), [(99.0, True), (50.0, False)])
    def test_the_best_known_plan_stays_unless_one_is_clearly_faster(
        self, searched, worker, database, uncommon, monkeypatch, others_us, stays
    ):
        database.put_plan(uncommon(OTHER), HERE)
        best = choices(uncommon(PROBLEM))

        def timed(graph, plans, effort, seed=0):
            return [Timing(WIDE) if choices(p) == best else steady(others_us) for p in plans]

        monkeypatch.setattr(worker, "time_programs", timed)
        assert (choices(searched().plan) == best) == stays

    def test_of_known_plans_that_tie_the_nearest_stays(
        self, searched, worker, database, by_hand, uncommon, monkeypatch
    ):
        database.put_plan(by_hand(Workload("se_resnet9_fixup", 16)), HERE)
        database.put_plan(uncommon(OTHER), HERE)
        nearest, rounds = choices(uncommon(PROBLEM)), []

        def timed(graph, plans, effort, seed=0):
            """At first the other one is lucky."""
            rounds.append(plans)
            if len(rounds) > 1:
                return [Timing(WIDE)] * len(plans)
            return [steady(60.0 if choices(plan) == nearest else 50.0) for plan in plans]

        monkeypatch.setattr(worker, "time_programs", timed)
        assert choices(searched().plan) == nearest

    def test_one_that_calls_use_does_not_hide_a_better_one(
        self, searched, worker, database, by_hand, uncommon, monkeypatch
    ):
        """A short search may have left a poor plan."""
        database.put_plan(by_hand(PROBLEM), HERE)
        database.put_plan(uncommon(OTHER), HERE)
        best, poor = choices(uncommon(PROBLEM)), choices(by_hand(PROBLEM))
        found = {best: Timing(WIDE), poor: steady(140.0)}

        def timed(graph, plans, effort, seed=0):
            return [found.get(choices(plan), steady(99.0)) for plan in plans]

        monkeypatch.setattr(worker, "time_programs", timed)
        assert choices(searched().plan) == best


class TestRepeats:
    def test_a_race_that_is_open_is_run_again_by_those_whom_it_leaves_open(self, searched, worker):
        first = {"plantune": "wide", "eager": 100.0, "torchscript-traced": 400.0}
        worker.answers = [first, *({"plantune": 60.0, "eager": 100.0} for _ in range(4))]
        result = searched()
        assert [routes for _, routes in worker.races[1:]] == [("eager",)]
        assert result.plan.route == "program"
        assert result.race.ratio.high < 1
        assert result.plan.evidence["ratio"] == result.race.ratio.ratio

    def test_where_it_stays_open_the_safe_way_runs(self, searched, worker):
        worker.answers = [{"plantune": "wide", "eager": 100.0} for _ in range(9)]
        result = searched()
        assert len(worker.races) == 1 + policy.MOST_REPEATS
        assert result.plan.route == "eager"

    def test_a_repeat_that_breaks_decides_nothing(self, searched, worker):
        worker.answers = [{"plantune": "wide", "eager": 100.0}, WorkerDied("it died")]
        assert searched().plan.route == "eager"

    def test_what_is_decided_runs_once(self, searched, worker):
        assert searched().plan.route == "program"
        assert len(worker.races) == 1
