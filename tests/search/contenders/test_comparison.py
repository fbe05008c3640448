"""What a search says of the plan that it found."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from plantune.base.outcome import Measured, Rejected
from plantune.measure.timing import Timing
from plantune.plans.guess import COMPILED, framework_plan, hand_plan
from plantune.plans.planner.candidates import step_candidates
from plantune.search.contenders.comparison import evened, fastest, is_tie
from plantune.search.contenders.kept_times import is_deterministic

pytestmark = pytest.mark.usefixtures("as_with_a_compiler")
GOOD = Measured(10.0, 9.0, 11.0, 9, 0.0, 1.0, True)


@pytest.fixture
def plan(graph, space):
    return framework_plan(graph, space, network="small")


@pytest.fixture
def outcomes(graph, space):
    return {item.key: GOOD for item in step_candidates(graph, space)}


def chosen(plan, outcomes):
    """The keys of the trials of candidates that the plan has."""
    candidates = {choice.candidate for choice in plan.choices}
    return [key for key in outcomes if key[1] in candidates]


def test_a_plan_of_deterministic_kernels_is_so(plan, graph, space, outcomes):
    assert is_deterministic(plan, graph, space, outcomes)


@pytest.mark.parametrize("other", [replace(GOOD, deterministic=False), Rejected("noisy", ""), None])
def test_one_kernel_that_may_differ_is_enough(plan, graph, space, outcomes, other):
    key = chosen(plan, outcomes)[0]
    assert not is_deterministic(plan, graph, space, {**outcomes, key: other})


def test_what_the_plan_does_not_run_does_not_count(plan, graph, space, outcomes):
    kept = set(chosen(plan, outcomes))
    others = {key: replace(GOOD, deterministic=False) for key in outcomes if key not in kept}
    assert others
    assert is_deterministic(plan, graph, space, {**outcomes, **others})


class TestTies:
    """Both were timed in turns: round i of one and of the other saw the same machine."""

    CLOCKS = [1.0, 1.4] * 20

    def paced(self, factor, wobble=0.0):
        noise = random.Random(1)
        paces = (factor * (1 + noise.uniform(-wobble, wobble)) for _ in self.CLOCKS)
        return Timing(tuple(100 * c * pace for c, pace in zip(self.CLOCKS, paces, strict=True)))

    def test_a_clock_with_two_speeds_hides_no_difference(self):
        assert not is_tie(self.paced(1.05), self.paced(1.0))
        assert not is_tie(self.paced(1.0), self.paced(1.05))

    @pytest.mark.parametrize("factor", [1.0, 1.005, 0.995])
    def test_a_percent_is_a_tie(self, factor):
        assert is_tie(self.paced(factor), self.paced(1.0))

    def test_what_is_not_sure_is_a_tie(self):
        wild = Timing(tuple(float(us) for us in (100, 180) * 10))
        calm = Timing(tuple(float(us) for us in (130, 131) * 10))
        assert is_tie(wild, calm)

    @pytest.mark.parametrize(("slower", "kept"), [(1.004, "simple"), (1.015, "fast")])
    def test_what_looks_slower_is_not_kept_for_being_simple(self, graph, space, slower, kept):
        """Of few rounds on a busy machine everything ties."""
        plans = {
            "fast": hand_plan(graph, space, network="small"),
            "simple": hand_plan(graph, space, network="small", without=COMPILED),
        }
        wild = (60.0, 140.0, 100.0)
        timings = [Timing(tuple(us * factor for us in wild)) for factor in (1.0, slower)]
        assert list(plans)[fastest(list(plans.values()), timings)] == kept


def test_a_slow_phase_of_the_machine_slows_all_that_ran_then():
    """Of half the rounds each the median would lie between both speeds, by luck."""
    paces = (1.0, 1.7) * 5
    wobble = (1.0, 1.01, 0.99, 1.02, 1.0, 0.98, 1.01, 1.0, 0.99, 1.0)
    timed = [
        Timing(tuple(us * pace * w for pace, w in zip(paces, wobble, strict=True)))
        for us, wobble in ((100.0, wobble), (104.0, wobble[::-1]), (110.0, wobble[3:] + wobble[:3]))
    ]
    rejected = Rejected("crash", "")
    one, two, gone, three = evened([*timed[:2], rejected, timed[2]])
    assert gone == rejected
    assert max(one.samples_us) / min(one.samples_us) < 1.1
    assert two.median_us / one.median_us == pytest.approx(1.04, abs=0.02)
    assert three.median_us / one.median_us == pytest.approx(1.1, abs=0.02)
    assert evened(timed[:1]) == timed[:1]


def test_what_disturbs_one_call_alone_is_not_shared_out_to_the_others():
    """The middle one's time was the pace of each round: it always took the same, others did not."""
    wobble = [90.0, 110.0, 95.0, 105.0, 100.0] * 2
    steady, other = Timing((80.0,) * 10), Timing((120.0,) * 10)
    middle = Timing(tuple(wobble))
    found = evened([steady, middle, other])
    assert [sorted(set(timing.samples_us)) for timing in found] == [
        [80.0],
        sorted(set(wobble)),
        [120.0],
    ]
