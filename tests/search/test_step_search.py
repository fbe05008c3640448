"""What gets measured, in which order, and what is left out."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from plantune.base.outcome import Measured, Rejected
from plantune.kernels.conversions import conversion_cost
from plantune.plans.guess import hand_plan
from plantune.plans.planner.cover import best_covers
from plantune.search.budget import Budget
from plantune.search.builds import Builds
from plantune.search.costs import Costs
from plantune.search.policy import LEAST_PER_COVER, MOST_FAULTS, SLOWER
from plantune.search.results import StepsSum, silent
from plantune.search.step_search import StepSearch
from plantune.space.arch import load_arch

CONVERSION = conversion_cost(load_arch("cpu"))
PLENTY = 600.0
pytestmark = pytest.mark.usefixtures("as_with_a_compiler")


@pytest.fixture
def search(graph, space, measurer, store):
    return StepSearch(graph, space, measurer, store)


def best_of_all(search, measurer, graph):
    """The best cover if every candidate had been measured."""
    costs = Costs()
    for item in search.candidates:
        time_us = measurer.time_us(item.step, item.candidate)
        costs.learn(item, Measured(time_us, time_us, time_us, 9, 0.0, 1.0, True))
    priced = costs.priced(search.candidates, measured_only=True)
    return best_covers(graph, priced, 1, CONVERSION)[0][0]


def test_nothing_is_measured_twice(search, measurer):
    search.run(Budget(PLENTY), silent)
    assert len(measurer.asked) == len(set(measurer.asked))


def test_the_end_holds_measured_steps_only(search):
    search.run(Budget(PLENTY), silent)
    _, cover = search.covers(1)[0]
    assert all(map(search.costs.knows, cover))


def test_most_candidates_need_no_measuring(search, measurer):
    search.run(Budget(PLENTY), silent)
    assert len(measurer.asked) < len({item.key for item in search.candidates}) / 2


def test_the_cover_is_near_the_best_there_is(search, measurer, graph):
    search.run(Budget(PLENTY), silent)
    assert search.covers(1)[0][0] <= 1.15 * best_of_all(search, measurer, graph)


def test_equal_steps_share_a_measurement(space, measurer, store):
    import torch
    from torch import nn

    from plantune.graph.tracing.extract import extract
    from plantune.graph.types import TensorType

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Conv2d(4, 4, 3, 1, 1, bias=False) for _ in range(2))

        def forward(self, x):
            return torch.relu(self.b(torch.relu(self.a(x))))

    graph = extract(Twice().eval(), TensorType((2, 4, 8, 8)))
    search = StepSearch(graph, space, measurer, store)
    search.run(Budget(PLENTY), silent)
    signatures = {step.signature for step in (t.step for t in search.candidates)}
    assert {signature for signature, _ in measurer.asked} <= signatures
    assert len(measurer.asked) == len(set(measurer.asked))


def test_a_rejected_candidate_is_in_no_cover(graph, space, broken, store):
    measurer = broken(reject=("onednn_conv", "winograd", "inductor"))
    search = StepSearch(graph, space, measurer, store)
    search.run(Budget(PLENTY), silent)
    assert any(isinstance(outcome, Rejected) for outcome in search.costs.outcomes.values())
    _, cover = search.covers(1)[0]
    assert not {o.candidate.family for o in cover} & set(measurer.reject)


def test_a_family_that_is_always_wrong_is_left_alone(graph, space, broken, store):
    measurer = broken(reject=("onednn_conv",))
    StepSearch(graph, space, measurer, store).run(Budget(PLENTY), silent)
    asked = [candidate.family for _, candidate in measurer.asked]
    assert 0 < asked.count("onednn_conv") < MOST_FAULTS + 2 * LEAST_PER_COVER


def test_what_others_disturbed_is_measured_once_more(graph, space, broken, store):
    """Else a neighbour decides which kernels a plan has."""
    measurer = broken(disturbed=1)
    search = StepSearch(graph, space, measurer, store)
    search.run(Budget(PLENTY), silent)
    assert {measurer.asked.count(each) for each in measurer.asked} == {2}
    assert all(isinstance(outcome, Measured) for outcome in search.costs.outcomes.values())


def test_what_they_always_disturb_is_left_alone(graph, space, broken, store):
    measurer = broken(disturbed=99)
    search = StepSearch(graph, space, measurer, store)
    search.run(Budget(PLENTY), silent)
    assert {measurer.asked.count(each) for each in measurer.asked} == {2}
    assert search.measured == 0


def test_a_plan_to_begin_with_waits_for_its_kernels(graph, space, measurer, store, monkeypatch):
    """What needs no build is measured before them."""

    def build(candidate):
        while not measurer.asked:
            time.sleep(0.001)
        built.add(candidate.key)

    def measured(step, candidate, limit_us):
        assert (step.signature, candidate) in built or candidate.family != "winograd"
        return measure(step, candidate, limit_us)

    built, measure = set(), measurer.measure
    monkeypatch.setattr(measurer, "measure", measured)
    plan = hand_plan(graph, space, network="small")
    builds = Builds(build, lambda c: c.key if c.candidate.family == "winograd" else None, 1)
    search = StepSearch(graph, space, measurer, store, builds=builds)
    search.begin_with(plan, Budget(PLENTY), silent)
    builds.close()
    assert "winograd" in {candidate.family for _, candidate in measurer.asked}
    assert {choice.candidate for choice in plan.choices} <= {c for _, c in measurer.asked}


def test_a_resumed_search_asks_for_nothing_that_it_knows(graph, space, measurer, store):
    StepSearch(graph, space, measurer, store).run(Budget(PLENTY), silent)
    known = set(measurer.asked)
    measurer.asked.clear()
    again = StepSearch(graph, space, measurer, store)
    again.run(Budget(PLENTY), silent)
    assert known.isdisjoint(measurer.asked)
    assert len(measurer.asked) < len(known) / 4
    assert math.isfinite(again.covers(1)[0][0])


def test_beside_other_searches_it_takes_a_part_of_its_share(search):
    many = list({c.key: c for c in search.candidates}.values()) * 4
    assert len(search._built(many, Budget(PLENTY))) == len(many) // 4
    search._shared = SimpleNamespace(searches=5)
    assert len(search._built(many, Budget(PLENTY))) == len(many) // 20 > LEAST_PER_COVER
    assert len(search._built(many[:20], Budget(PLENTY))) == LEAST_PER_COVER


def test_what_cannot_win_need_not_be_known_well(search, measurer):
    """The limit is 1.5 times the best of the step, as soon as there is one."""
    search.run(Budget(PLENTY), silent)
    best: dict[str, float] = {}
    for (signature, candidate), limit_us in zip(measurer.asked, measurer.limits_us, strict=True):
        assert limit_us == SLOWER * best.get(signature, math.inf)
        step = next(t.step for t in search.candidates if t.step.signature == signature)
        time_us = measurer.time_us(step, candidate)
        best[signature] = min(best.get(signature, math.inf), time_us)
    assert any(map(math.isfinite, measurer.limits_us))


def test_without_time_the_guess_decides(search, measurer):
    search.run(Budget(0.0), silent)
    assert measurer.asked == []
    assert math.isfinite(search.covers(1)[0][0])


def test_the_framework_is_tried_op_by_op_only(search):
    fused = [t for t in search.candidates if t.candidate.family == "framework"]
    assert fused
    assert all(len(t.step.nodes) == 1 for t in fused)


def test_progress_tells_of_every_measurement(search, measurer):
    reports = []
    search.run(Budget(PLENTY), reports.append)
    assert len(reports) == len(measurer.asked)
    assert [p.measured for p in reports] == list(range(len(reports)))
    assert reports[-1].best.us <= reports[-1].framework.us


def test_sums_of_steps_are_of_this_moment_and_say_how_much_is_estimated(search):
    """However good estimates are made to look so that more is measured."""
    framework, costs = search.knowledge._framework, search.costs
    ops = {c.step.nodes[0].op: c for c in framework}
    first, *rest = ops.values()
    assert search.framework().estimated == search.framework().steps == len(framework)
    for number, candidate in enumerate(rest):
        us = (2 if number else 1) * candidate.estimate_us
        costs.learn(candidate, Measured(us, us, us, 9, 0.0, 1.0, True))
    costs.discount = 0.5
    assert len(rest) >= 2
    assert costs.expected_us(first) >= first.estimate_us
    assert search.framework().us == sum(map(costs.expected_us, framework))
    assert (
        search.framework().estimated == sum(not costs.knows(c) for c in framework) < len(framework)
    )
    before = search.best()
    for candidate in framework:
        costs.learn(candidate, Measured(1.0, 1.0, 1.0, 9, 0.0, 1.0, True))
    assert search.framework() == StepsSum(float(len(framework)), len(framework), 0)
    assert search.best().estimated < before.estimated


class TestCosts:
    def test_guesses_follow_what_their_family_turned_out(self, search):
        costs = search.costs
        one, two = [t for t in search.candidates if t.candidate.family == "inductor"][:2]
        guess = costs.of(two)
        time_us = 3 * one.estimate_us
        costs.learn(one, Measured(time_us, time_us, time_us, 9, 0.0, 1.0, True))
        assert costs.of(one) == time_us
        assert costs.of(two) == pytest.approx(3 * guess)

    def test_a_rejected_candidate_costs_infinitely_much(self, search):
        item = search.candidates[0]
        search.costs.learn(item, Rejected("build", "no"))
        assert search.costs.of(item) == math.inf
        assert item.key not in {item.key for item, _ in search.costs.priced(search.candidates)}


class TestWhatComesFirst:
    def test_a_plan_to_begin_with_is_measured_by_what_its_steps_take_together(
        self, graph, space, search, measurer
    ):
        plan = hand_plan(graph, space, network="small")
        chosen = {(c.nodes, c.candidate) for c in plan.choices}
        of_plan = search.knowledge.weighed(
            c for c in search.candidates if (c.nodes, c.candidate) in chosen
        )
        search.begin_with(plan, Budget(PLENTY), silent)
        assert measurer.asked == [candidate.key for candidate, _ in of_plan]
        assert [us for _, us in of_plan] == sorted((us for _, us in of_plan), reverse=True)

    def test_equal_steps_weigh_together(self, search):
        one, *_ = search.candidates
        (found,) = search.knowledge.weighed([one, one, one])
        assert found == (one, 3 * search.costs.of(one))

    def test_more_configs_of_a_heavy_step_come_before_the_next_of_a_light_one(self, search):
        heavy, light = (
            next(
                c
                for c in search.candidates
                if c.candidate.family == "onednn_conv" and c.nodes[0] == n
            )
            for n in ("conv1/conv2d", "conv2/conv2d")
        )
        ahead = [*search.knowledge.clusters.ahead([(light, 1.0), (heavy, 100.0)], 6)]
        first_light = next(i for i, c in enumerate(ahead) if c.nodes == light.nodes)
        assert {c.nodes for c in ahead[:first_light]} == {heavy.nodes}
        assert first_light > 1
