"""Given timings: which plan is kept and who runs it, live and frozen."""

from __future__ import annotations

import pytest

from plantune.measure.racing.built_routes import PLANTUNE
from plantune.measure.racing.race import Race
from plantune.measure.timing import Timing
from plantune.plans import raced_routes
from plantune.plans.guess import framework_plan
from plantune.plans.standing import CAPTURED, Standing, loss_text
from plantune.search.contenders.judgement import judged, pairs_of, repeated, undecided

WIDE = (60.0, 140.0, 100.0, 75.0, 125.0, 90.0, 110.0, 100.0)


def steady(us):
    return Timing(tuple(us * (1 + 0.001 * (i % 3)) for i in range(8)))


def race(**us):
    """Who took how long; a plan that takes "wide" may be faster or slower than 100."""
    timings = {name.replace("_", "-"): time for name, time in us.items()}
    ready = {n: Timing(WIDE) if t == "wide" else steady(t) for n, t in timings.items()}
    return Race(ready, {}, None, None)


@pytest.fixture
def plan(graph, space):
    return framework_plan(graph, space, network="small")


def decided(plan, plain=None, **us):
    found = judged(plan, pairs_of(race(**us)), plain)
    return found.route, found.frozen_route


class TestLive:
    def test_what_beats_all_beyond_doubt_runs(self, plan):
        us = {"plantune": 80, "eager": 100, "eager_channels_last": 90, "torchscript_traced": 95}
        assert decided(plan, **us) == ("program", None)

    @pytest.mark.parametrize("best", ["eager", "eager_channels_last", "torchscript_traced"])
    def test_a_plan_that_lost_is_run_by_the_winner(self, plan, best):
        us = {"plantune": 90, "eager": 120, "eager_channels_last": 120, "torchscript_traced": 120}
        route, _ = decided(plan, **{**us, best: 80})
        assert route == best.replace("_", "-")

    @pytest.mark.parametrize("us", ["wide", 100, 100.05])
    def test_a_tie_is_not_a_win(self, plan, us):
        assert decided(plan, plantune=us, eager=100, torchscript_traced=120) == ("eager", None)

    def test_a_tie_with_one_and_a_win_over_the_other_is_none(self, plan):
        assert decided(plan, plantune="wide", eager=500, torchscript_traced=100)[0] == (
            "torchscript-traced"
        )

    def test_what_is_not_clearly_faster_than_eager_does_not_run_in_its_place(self, plan):
        unsure = {"plantune": "wide", "eager_channels_last": "wide"}
        assert decided(plan, **unsure, eager=101) == ("eager", None)
        assert decided(plan, **unsure, eager=300)[0] == "eager-channels-last"

    def test_after_one_round_eager_runs(self, plan):
        times = {"plantune": 40.0, "eager": 36.0, "eager-channels-last": 24.0}
        found = Race({name: Timing((us,)) for name, us in times.items()}, {}, None, None)
        assert judged(plan, pairs_of(found)).route == "eager"

    def test_a_route_that_freezes_or_compiles_takes_no_live_plans_place(self, plan):
        us = {"plantune": 90, "eager": 100, "torchscript": 50, "compile_default": 40}
        assert decided(plan, **us) == ("program", "torchscript")

    def test_without_other_routes_the_program_runs(self, plan):
        assert decided(plan, plantune=90) == ("program", None)


class TestFrozen:
    def test_who_wins_live_runs_frozen_too(self, plan):
        us = {"plantune": 120, "eager": 100, "torchscript": 110}
        assert decided(plan, **us) == ("eager", None)

    def test_the_best_frozen_route_runs_frozen_alone(self, plan):
        us = {"plantune": 120, "eager": 100, "torchscript": 80, "torchscript_channels_last": 70}
        assert decided(plan, **us) == ("eager", "torchscript-channels-last")


class TestCaptured:
    """A captured graph of the framework's kernels is a plan of these kernels."""

    def test_it_takes_the_place_of_a_plan_that_lost_to_it(self, plan, graph, space):
        plain = framework_plan(graph, space, network="plain")
        pairs = pairs_of(race(plantune=100, cuda_graph=90, eager=300))
        found = judged(plan, pairs, plain)
        assert (found.problem.network, found.route) == ("plain", "program")

    def test_a_plan_that_won_stays(self, plan, graph, space):
        plain = framework_plan(graph, space, network="plain")
        found = judged(plan, pairs_of(race(plantune=80, cuda_graph=90, eager=300)), plain)
        assert (found.problem.network, found.route) == ("small", "program")


class TestCompiled:
    def test_a_plan_that_loses_to_torch_compile_says_so(self, plan):
        found = judged(plan, pairs_of(race(plantune=80, eager=100, compile_default=40)))
        assert found.evidence[raced_routes.LOST_TO] == "compile-default"
        assert found.evidence[raced_routes.LOSS] == pytest.approx(2.0, rel=0.01)
        assert loss_text(found.evidence) == (
            "compile-default was faster: a call takes 2.00 of its time"
        )

    def test_it_is_about_what_runs(self, plan):
        found = judged(plan, pairs_of(race(plantune=400, eager=100, compile_default=50)))
        assert found.route == "eager"
        assert found.evidence[raced_routes.LOSS] == pytest.approx(2.0, rel=0.01)

    @pytest.mark.parametrize("us", [80, 100])
    def test_a_win_and_a_tie_say_nothing(self, plan, us):
        found = judged(plan, pairs_of(race(plantune=80, eager=200, compile_default=us)))
        assert loss_text(found.evidence) is None


class TestStanding:
    """What the evidence says of who runs, which is what people read of it."""

    def headline(self, plan, plain=None, **us):
        found = judged(plan, pairs_of(race(**us)), plain)
        return Standing.of(found.route, found.evidence).headline()

    def test_a_plan_that_won_is_compared_with_eager(self, plan):
        text = self.headline(plan, plantune=50, eager=100, torchscript_traced=80)
        assert text.startswith("runs as plantune's plan, 2.00 times faster than eager")

    def test_another_route_that_runs_is_compared_with_eager_too(self, plan):
        text = self.headline(plan, plantune=60, eager=100, torchscript_traced=50)
        assert text.startswith(
            "runs as torchscript-traced, 2.00 times faster than eager: every plan was slower "
            "(best: 1.200 of its time"
        )

    def test_what_varied_decided_nothing(self, plan):
        text = self.headline(plan, plantune="wide", eager=100)
        assert text.startswith("runs as eager: times varied too much to show that a plan is faster")

    def test_a_route_that_need_not_be_beaten_is_no_reason(self, plan):
        """Frozen and compiled routes take no live plan's place."""
        text = self.headline(plan, plantune=100, eager=100, compile_frozen=20)
        assert text.startswith("runs as eager: no plan was clearly faster (best: 1.000 of its time")

    def test_a_route_that_varied_as_it_ran_is_not_said_to_be_faster(self, plan):
        us = {"plantune": 90, "eager": 100, "eager_channels_last": "wide"}
        assert self.headline(plan, **us).startswith(
            "runs as eager-channels-last, neither clearly faster nor slower than eager: times "
            "varied too much to show that a plan is faster (best: 0.901 of its time"
        )

    def test_a_captured_graph_keeps_the_race_that_it_won(self, plan, graph, space):
        """It was kept without evidence, as if nothing had been raced."""
        plain = framework_plan(graph, space, network="plain")
        us = {"plantune": 100, "cuda_graph": 90, "eager": 300, "torchscript_traced": 270}
        found = judged(plan, pairs_of(race(**us)), plain)
        assert found.evidence["median_ms"] == pytest.approx(0.09, rel=0.01)
        assert (found.evidence["baseline"], found.evidence["rivals"]) == (
            "torchscript-traced",
            "eager,torchscript-traced",
        )
        assert found.evidence["ratio"] == pytest.approx(1 / 3, rel=0.01)
        assert self.headline(plan, plain, **us).startswith(
            "runs as the framework's kernels in one CUDA graph, 3.33 times faster than eager: "
            "every plan was slower (best: 1.111 of its time"
        )

    def test_a_captured_graph_loses_to_torch_compile_by_its_own_time(self, plan, graph, space):
        plain = framework_plan(graph, space, network="plain")
        us = {"plantune": 200, "cuda_graph": 100, "eager": 300, "compile_default": 50}
        found = judged(plan, pairs_of(race(**us)), plain)
        assert found.evidence[raced_routes.LOSS] == pytest.approx(2.0, rel=0.01)


class TestAgain:
    def test_what_is_open_is_raced_again(self):
        pairs = pairs_of(race(plantune="wide", eager=100, torchscript_traced=500))
        assert undecided(pairs) == ("eager",)

    @pytest.mark.parametrize("us", [80, 120])
    def test_what_is_decided_is_not(self, us):
        assert undecided(pairs_of(race(plantune=us, eager=100))) == ()

    def test_of_a_plan_that_lost_nothing_is_open(self):
        pairs = pairs_of(race(plantune="wide", eager=100, torchscript_traced=20))
        assert undecided(pairs) == ()

    def test_other_promises_are_not_raced_again(self):
        assert undecided(pairs_of(race(plantune="wide", compile_default=100))) == ()

    def test_a_captured_graph_is(self):
        assert undecided(pairs_of(race(plantune="wide", cuda_graph=100))) == (CAPTURED,)

    def test_all_rounds_count(self, plan):
        first = pairs_of(race(plantune="wide", eager=100, torchscript_traced=500))
        again = race(plantune=70, eager=100)
        pairs = first
        for _ in range(4):
            pairs = repeated(pairs, again)
        assert pairs["eager"].ours.samples == 8 * 5
        assert pairs["torchscript-traced"].ours.samples == 8
        assert undecided(pairs) == ()
        assert judged(plan, pairs).route == "program"

    def test_compiled_routes_are_judged_by_the_rounds_that_both_ran(self, plan):
        pairs = repeated(
            pairs_of(race(plantune=120, eager=100, compile_default=50)),
            race(plantune=120, eager=100),
        )
        assert judged(plan, pairs).evidence[raced_routes.LOSS] == pytest.approx(2.0, rel=0.01)


def test_the_name_of_our_row():
    assert PLANTUNE == "plantune"
