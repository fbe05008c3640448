"""What a search begins from: known plans, built and timed before anything else."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from plantune.base.outcome import Rejected
from plantune.errors import OutOfTime
from plantune.plans.checked_plan import check_plan
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.guess import framework_plan, hand_plan
from plantune.plans.planner.candidates import candidates_of
from plantune.search import sought
from plantune.search.builds import Builds
from plantune.search.contenders import affordable, choice, known, ranking
from plantune.search.contenders.contender import FRAMEWORK, GUESS, Contenders, labelled
from plantune.search.machine_log import MachineLog
from plantune.search.results import SearchOptions
from plantune.search.step_search import StepSearch
from plantune.space.search_space import load_search_space

from .searching import HERE, OTHER, PROBLEM, choices, family, search_of, steady

SPACE = load_search_space("cpu")


class TestWarmStart:
    def test_the_first_thing_that_is_timed_is_what_other_batches_have(
        self, searched, worker, database, by_hand
    ):
        database.put_plan(by_hand(OTHER), HERE)
        result = searched()
        (first,) = worker.timed[0]
        assert choices(first) == choices(by_hand(PROBLEM))
        assert [*result.stages_s][:3] == ["preparing", "measuring", "timing known plans"]
        assert (worker.efforts[0].retries, worker.efforts[0].relative) == (0, True)

    @pytest.mark.usefixtures("searched")
    def test_calls_that_take_long_here_leave_the_race_more_time(self, worker, database, by_hand):
        """On busy cores they take a hundred times what their steps are thought to take."""
        database.put_plan(by_hand(OTHER), HERE)
        left = []
        for worker.us in (50.0, 5e5):
            found = search_of(PROBLEM, SearchOptions(60.0), database, HERE)
            found.run(worker)
            left.append(60.0 - found.budget._end_s("ranking"))
        assert left[0] < 20 < left[1]

    def test_its_kernels_are_built_while_candidates_are_listed(
        self, searched, database, by_hand, monkeypatch
    ):
        class Listed(Exception):
            """The rest of the search would wait for kernels that nobody builds."""

        events = []

        def lists(*arguments, **options):
            events.append("candidates")
            raise Listed

        monkeypatch.setattr(StepSearch, "__init__", lists)
        monkeypatch.setattr(Builds, "want", lambda self, wanted: events.append([*wanted]))
        database.put_plan(by_hand(OTHER), HERE)
        with pytest.raises(Listed):
            searched()
        plan, space = by_hand(PROBLEM), SPACE
        wanted = {c.key for c in candidates_of(plan, PROBLEM.graph, space)}
        assert ({c.key for c in events[0]}, events[1]) == (wanted, "candidates")

    @pytest.mark.parametrize("ever", [True, False])
    def test_one_whose_kernels_could_not_be_built_at_first_is_ranked_when_they_are(
        self, worker, database, uncommon, monkeypatch, ever
    ):
        """At 30 s shipped plans had been forgotten, since all their kernels take 7 s to build."""
        missing_s = [1e9]

        def measures(steps, budget, report):
            if ever:
                missing_s.append(0.0)

        monkeypatch.setattr(StepSearch, "run", measures)
        monkeypatch.setattr(affordable, "building_s", lambda plan, *others: missing_s[-1])
        # The others are not what this is about.
        monkeypatch.setattr(ranking, "affordable", lambda plans, *others: [*plans])
        database.put_plan(uncommon(OTHER), HERE)
        search_of(PROBLEM, SearchOptions(30.0), database, HERE).run(worker)
        ranked = [*map(choices, worker.timed[0])]
        assert (choices(uncommon(PROBLEM)) in ranked) == ever

    def test_its_steps_are_measured_first(self, searched, worker, database, by_hand):
        database.put_plan(by_hand(OTHER), HERE)
        result = searched()
        families = {family(choice) for choice in by_hand(PROBLEM).choices}
        assert result.measured > 0
        assert "onednn_conv" in families

    def test_where_nothing_is_known_it_begins_with_the_plan_by_hand(self, searched, database):
        """So that searches with other seeds end alike."""
        searched()
        space = SPACE
        plan = hand_plan(PROBLEM.graph, space, network=PROBLEM.network)
        for chosen in check_plan(plan, PROBLEM.graph, space).of_pass:
            assert chosen.candidate in database.trials(chosen.step.signature, HERE)

    def test_an_early_end_keeps_it(self, worker, database, by_hand):
        database.put_plan(by_hand(OTHER), HERE)
        worker.interrupt_after = 0
        found = search_of(PROBLEM, SearchOptions(30.0), database, HERE)
        with pytest.raises(KeyboardInterrupt):
            found.run(worker)
        assert choices(found.partial().plan) == choices(by_hand(PROBLEM))

    def test_the_guess_that_calls_use_without_a_plan_is_among_them(
        self, searched, worker, by_hand, monkeypatch
    ):
        """So no search ends with less than that, even if it had no time to build anything else."""
        guess = replace(by_hand(PROBLEM), origin="guess")
        monkeypatch.setattr(sought, "guessed_plan", lambda graph, space, network: guess)
        monkeypatch.setattr(affordable, "building_s", lambda *arguments: 1e9)
        result = searched()
        assert worker.timed[0] == [guess]
        assert choices(result.plan) == choices(guess)

    @pytest.mark.parametrize("busy", [False, True])
    def test_the_guess_is_ranked_beside_what_was_found_though_other_plans_looked_better(
        self, searched, worker, guess, database, by_hand, monkeypatch, busy
    ):
        """Whatever the sums of steps and the first few rounds say."""
        state = SimpleNamespace(word="busy" if busy else "quiet", reason="", others=0.0)
        monkeypatch.setattr(MachineLog, "snapshot", lambda self, stage: state)
        monkeypatch.setattr(MachineLog, "evidence", lambda self: {})
        monkeypatch.setattr(MachineLog, "warnings", lambda self: ())
        database.put_plan(by_hand(OTHER), HERE)
        rounds = []

        def timed(graph, plans, effort, seed=0):
            """The first time the known plan is quicker than the guess, then slower."""
            rounds.append(plans)
            us = 60.0 if len(rounds) == 1 else 40.0
            return [steady(us if choices(plan) == choices(guess) else 50.0) for plan in plans]

        monkeypatch.setattr(worker, "time_programs", timed)
        assert choices(searched().plan) == choices(guess)

    @pytest.mark.parametrize("late", ["at first", "in the ranking"])
    def test_where_there_is_no_time_for_the_guess_nothing_takes_its_place(
        self, searched, worker, guess, monkeypatch, late
    ):
        def timed(graph, plans, effort, seed=0):
            if late == "at first" and len(plans) == 1:
                raise OutOfTime("it took too long")
            slow = Rejected("timeout", "it took too long")
            return [slow if plan == guess and len(plans) > 1 else steady(50.0) for plan in plans]

        monkeypatch.setattr(worker, "time_programs", timed)
        if late == "at first":
            monkeypatch.setattr(
                affordable, "building_s", lambda plan, *others: 1e9 if plan == guess else 0.0
            )
        expected = (
            pytest.warns(UserWarning, match="timeout")
            if late == "in the ranking"
            else nullcontext()
        )
        with expected:
            result = searched()
        assert (result.race, worker.races) == (None, [])

    def test_where_the_guess_is_not_ranked_the_frameworks_kernels_do_not_take_its_place(
        self, searched, worker, by_hand, monkeypatch
    ):
        guess = replace(by_hand(PROBLEM), origin="guess")
        monkeypatch.setattr(sought, "guessed_plan", lambda graph, space, network: guess)
        monkeypatch.setattr(affordable, "building_s", lambda *arguments: 0.0)

        def few(run, known):
            return Contenders.of([*labelled(FRAMEWORK, [plain]), *known.having(GUESS)])

        monkeypatch.setattr(choice, "all_contenders", few)
        plain = framework_plan(PROBLEM.graph, SPACE, network=PROBLEM.network)

        def timed(graph, plans, effort, seed=0):
            died = len(plans) > 1 and Rejected("crash", "it died")
            return [died if died and plan == guess else steady(50.0) for plan in plans]

        monkeypatch.setattr(worker, "time_programs", timed)
        with pytest.warns(UserWarning, match="beside the others: crash: it died"):
            result = searched()
        assert result.race is None

    def test_shipped_plans_may_be_left_out(self, searched, worker, by_hand, monkeypatch):
        with PlanDatabase.in_memory() as other:
            other.put_plan(by_hand(OTHER), replace(HERE, device_digest="another"))
            rows = list(other.plans())
        monkeypatch.setattr(known, "stored_plans_in", lambda path: rows)
        searched(shipped=False)
        assert len(worker.timed[0]) > 1  # the ranking is the first
        worker.timed.clear()
        searched()
        assert choices(worker.timed[0][-1]) == choices(by_hand(PROBLEM))
        assert len(worker.timed[0]) < len(worker.timed[1])
