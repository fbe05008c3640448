"""A search with a worker that says what each plan takes: what it begins from, keeps and repeats."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from plantune.default_plans import COMPILED, hand_plan
from plantune.errors import OutOfTime, WorkerDied
from plantune.machine import cpu_environment
from plantune.measure.race import Race
from plantune.measure.timing import Timing, ratio_interval
from plantune.outcome import Measured, Rejected
from plantune.plan import candidates_by_step, check_plan
from plantune.plan_db.database import PlanDatabase
from plantune.search import known, phases, ranking, search
from plantune.search.builds import Builds
from plantune.search.candidates import candidates_of
from plantune.search.machine_log import MachineLog
from plantune.search.results import Settings
from plantune.search.search import Search
from plantune.workload import Workload

HERE = cpu_environment()
PROBLEM, OTHER = Workload("se_resnet9_fixup", 1), Workload("se_resnet9_fixup", 2)
WIDE = (60.0, 140.0, 100.0, 75.0, 125.0, 90.0, 110.0, 100.0)


def search_of(workload, *arguments):
    return Search(workload.graph, workload.problem, *arguments)


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
        return self.us if "onednn_conv" in map(_family, plan.choices) else 100.0

    def rooflines(self, steps, arch):
        return [1.0 + number for number in range(len(steps))]

    def race(self, raced, plan, baselines, effort, seed):
        self.races.append((plan, baselines))
        answer = self.answers.pop(0) if self.answers else {"plantune": self.us, "eager": 100.0}
        if isinstance(answer, Exception):
            raise answer
        timings = {n: Timing(WIDE) if t == "wide" else steady(t) for n, t in answer.items()}
        others = {n: t for n, t in timings.items() if n != "plantune"}
        best = min(others, key=lambda name: others[name].median_us)
        return Race(timings, {}, best, ratio_interval(timings["plantune"], timings[best]))


def _family(choice):
    return choice.candidate.family


@pytest.fixture
def database():
    with PlanDatabase.in_memory() as opened:
        yield opened


@pytest.fixture
def worker():
    return FakeWorker()


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch):
    monkeypatch.setattr(known, "stored_plans_in", lambda path: [])


@pytest.fixture
def by_hand():
    def plan(problem, **changes):
        space = search_of(problem, Settings(), None, HERE).space
        made = hand_plan(problem.graph, space, network=problem.network, without=COMPILED)
        return replace(made, origin="measured", **changes)

    return plan


@pytest.fixture
def uncommon(by_hand):
    """Makes a plan that no other part of a search would come upon."""

    def plan(problem):
        made, space = by_hand(problem), search_of(problem, Settings(), None, HERE).space
        number = next(i for i, c in enumerate(made.choices) if _family(c) == "onednn_conv")
        plain = search.default_plan(problem.graph, space, network=problem.network)
        alone = [c for c in plain.choices if c.nodes[0] in made.choices[number].nodes]
        assert len(made.choices[number].nodes) == len(alone)
        rest = (*made.choices[:number], *made.choices[number + 1 :])
        return replace(made, choices=(*rest, *alone))

    return plan


@pytest.fixture
def guess(uncommon, monkeypatch):
    """What calls use without a plan."""
    made = replace(uncommon(PROBLEM), origin="default")
    monkeypatch.setattr(search, "guessed_plan", lambda graph, space, network: made)
    return made


@pytest.fixture
def searched(database, worker, monkeypatch):
    """A search that measures nothing but what it begins with."""
    monkeypatch.setattr(search.StepSearch, "run", lambda steps, budget, report: None)

    def run(budget_s=30.0, **settings):
        return search_of(PROBLEM, Settings(budget_s, **settings), database, HERE).run(worker)

    return run


def choices(plan):
    return frozenset(plan.choices)


class TestBeginning:
    def test_the_first_thing_that_is_timed_is_what_other_batches_have(
        self, searched, worker, database, by_hand
    ):
        database.put_plan(by_hand(OTHER), HERE)
        result = searched()
        (first,) = worker.timed[0]
        assert choices(first) == choices(by_hand(PROBLEM))
        assert [*result.phases_s][:3] == ["preparing", "measuring", "timing known plans"]
        assert (worker.efforts[0].retries, worker.efforts[0].relative) == (0, True)

    @pytest.mark.usefixtures("searched")
    def test_calls_that_take_long_here_leave_the_race_more_time(self, worker, database, by_hand):
        """On busy cores they take a hundred times what their steps are thought to take."""
        database.put_plan(by_hand(OTHER), HERE)
        left = []
        for worker.us in (50.0, 5e5):
            found = search_of(PROBLEM, Settings(60.0), database, HERE)
            found.run(worker)
            left.append(60.0 - found._budget._end_s("ranking"))
        assert left[0] < 20 < left[1]

    def test_its_kernels_are_built_while_candidates_are_listed(
        self, searched, database, by_hand, monkeypatch
    ):
        events = []
        listed = search.StepSearch.__init__

        def lists(*arguments, **options):
            events.append("candidates")
            listed(*arguments, **options)

        monkeypatch.setattr(search.StepSearch, "__init__", lists)
        monkeypatch.setattr(Builds, "want", lambda self, wanted: events.append([*wanted]))
        database.put_plan(by_hand(OTHER), HERE)
        searched()
        plan, space = by_hand(PROBLEM), search_of(PROBLEM, Settings(), None, HERE).space
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

        monkeypatch.setattr(search.StepSearch, "run", measures)
        monkeypatch.setattr(ranking, "building_s", lambda plan, *others: missing_s[-1])
        # The others are not what this is about.
        monkeypatch.setattr(ranking, "affordable", lambda plans, *others: [*plans])
        database.put_plan(uncommon(OTHER), HERE)
        search_of(PROBLEM, Settings(30.0), database, HERE).run(worker)
        ranked = [*map(choices, worker.timed[0])]
        assert (choices(uncommon(PROBLEM)) in ranked) == ever

    def test_its_steps_are_measured_first(self, searched, worker, database, by_hand):
        database.put_plan(by_hand(OTHER), HERE)
        result = searched()
        families = {_family(choice) for choice in by_hand(PROBLEM).choices}
        assert result.measured > 0
        assert "onednn_conv" in families

    def test_where_nothing_is_known_it_begins_with_the_plan_by_hand(self, searched, database):
        """So that searches with other seeds end alike."""
        searched()
        space = search_of(PROBLEM, Settings(), None, HERE).space
        plan = hand_plan(PROBLEM.graph, space, network=PROBLEM.network)
        steps = check_plan(plan, PROBLEM.graph, space)
        chosen = candidates_by_step(plan, steps)
        for step in (step for step in steps if step.phase != "refresh"):
            assert chosen[step.name] in database.trials(step.signature, HERE)

    def test_an_early_end_keeps_it(self, worker, database, by_hand):
        database.put_plan(by_hand(OTHER), HERE)
        worker.interrupt_after = 0
        found = search_of(PROBLEM, Settings(30.0), database, HERE)
        with pytest.raises(KeyboardInterrupt):
            found.run(worker)
        assert choices(found.partial().plan) == choices(by_hand(PROBLEM))

    def test_the_guess_that_calls_use_without_a_plan_is_among_them(
        self, searched, worker, by_hand, monkeypatch
    ):
        """So no search ends with less than that, even if it had no time to build anything else."""
        guess = replace(by_hand(PROBLEM), origin="default")
        monkeypatch.setattr(search, "guessed_plan", lambda graph, space, network: guess)
        monkeypatch.setattr(ranking, "building_s", lambda *arguments: 1e9)
        result = searched()
        assert worker.timed[0] == [guess]
        assert choices(result.plan) == choices(guess)

    @pytest.mark.parametrize("busy", [False, True])
    def test_the_guess_is_ranked_beside_what_was_found_though_other_plans_looked_better(
        self, searched, worker, guess, database, by_hand, monkeypatch, busy
    ):
        """Whatever the sums of steps and the first few rounds say."""
        state = SimpleNamespace(word="busy" if busy else "quiet", reason="", others=0.0)
        monkeypatch.setattr(MachineLog, "snapshot", lambda self, phase: state)
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
                ranking, "building_s", lambda plan, *others: 1e9 if plan == guess else 0.0
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
        guess = replace(by_hand(PROBLEM), origin="default")
        for module in (search, known):
            monkeypatch.setattr(module, "guessed_plan", lambda graph, space, network: guess)
        monkeypatch.setattr(ranking, "building_s", lambda *arguments: 0.0)
        monkeypatch.setattr(search.Search, "_contenders", lambda self, *known: [plain, guess])
        found = search_of(PROBLEM, Settings(), None, HERE)
        plain = search.default_plan(PROBLEM.graph, found.space, network=PROBLEM.network)

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
        assert len(worker.timed[0]) == 1


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
        monkeypatch.setattr(search.StepSearch, "run", lambda steps, budget, report: None)
        monkeypatch.setattr(
            ranking, "building_s", lambda plan, *others: 1e9 if choices(plan) == kept else 0.0
        )
        with PlanDatabase.open(tmp_path / "plans.db") as database:
            database.put_plan(uncommon(PROBLEM), HERE)
            result = search_of(PROBLEM, Settings(30.0), database, HERE).run(worker)
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
        monkeypatch.setattr(
            worker,
            "time_programs",
            lambda graph, plans, *effort, seed=0: [Timing(WIDE)] * len(plans),
        )
        assert choices(searched().plan) == choices(uncommon(PROBLEM))

    def test_one_that_calls_use_does_not_hide_a_better_one(
        self, searched, worker, database, by_hand, uncommon, monkeypatch
    ):
        """A short search may have left a poor plan."""
        database.put_plan(by_hand(PROBLEM), HERE)
        database.put_plan(uncommon(OTHER), HERE)
        best, poor = choices(uncommon(PROBLEM)), choices(by_hand(PROBLEM))
        us = {best: 50.0, poor: 70.0}
        monkeypatch.setattr(worker, "time_of", lambda plan: us.get(choices(plan), 99.0))
        assert choices(searched().plan) == best


class TestRepeats:
    def test_a_race_that_is_open_is_run_again_by_those_whom_it_leaves_open(self, searched, worker):
        first = {"plantune": "wide", "eager": 100.0, "torchscript-traced": 400.0}
        worker.answers = [first, *({"plantune": 60.0, "eager": 100.0} for _ in range(4))]
        result = searched()
        assert [baselines for _, baselines in worker.races[1:]] == [("eager",)]
        assert result.plan.runner == "program"
        assert result.race.ratio.high < 1
        assert result.plan.evidence["ratio"] == result.race.ratio.ratio

    def test_where_it_stays_open_the_safe_way_runs(self, searched, worker):
        worker.answers = [{"plantune": "wide", "eager": 100.0} for _ in range(9)]
        result = searched()
        assert len(worker.races) == 1 + phases.MOST_REPEATS
        assert result.plan.runner == "eager"

    def test_a_repeat_that_breaks_decides_nothing(self, searched, worker):
        worker.answers = [{"plantune": "wide", "eager": 100.0}, WorkerDied("it died")]
        assert searched().plan.runner == "eager"

    def test_what_is_decided_runs_once(self, searched, worker):
        assert searched().plan.runner == "program"
        assert len(worker.races) == 1
