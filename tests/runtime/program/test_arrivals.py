"""A backward pass tells of each gradient once nothing of the pass writes it any more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan, hand_plan
from plantune.runtime.program.arrivals import arrival_places
from plantune.runtime.program.branches import Branch, branches_of
from plantune.runtime.program.memory_plan import passes
from plantune.runtime.program.program import Program
from plantune.runtime.program.schedule import make_schedule
from plantune.space.search_space import load_search_space


def graph_of(module, *shape):
    return differentiate(extract(module, TensorType(shape)))


def test_what_is_told_stays_as_it_is(randomise):
    torch.manual_seed(0)
    module = randomise(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)))
    graph, space = graph_of(module, 2, 3, 8, 8), load_search_space("cpu")
    program = Program(check_plan(framework_plan(graph, space, network="small"), graph, space))
    program.refresh(module.state_dict())
    program.forward(torch.randn(2, 3, 8, 8))
    (seed, type_), *_ = graph.output_gradients
    program.values[seed] = torch.randn(type_.shape)
    told = {}

    def tell(values):
        assert not told.keys() & set(values)
        told.update({value: program.values[value].clone() for value in values})

    program.run_backward(tell)
    assert told.keys() == {value for _, value in graph.gradients}
    assert all(torch.equal(program.values[value], then) for value, then in told.items())
    # The last layer's gradients come first.
    order = [*told]
    made = dict(graph.gradients)
    assert order.index(made["2.weight"]) < order.index(made["0.weight"])
    program.run_backward()  # and nobody is told


class TestPlaces:
    @pytest.fixture
    def schedule(self):
        torch.manual_seed(0)
        graph = graph_of(SEResNet9Fixup(3), 2048, 3, 64, 64)
        space = load_search_space("sm90")
        plan = hand_plan(graph, space, network="by hand")
        return make_schedule(check_plan(plan, graph, space))

    @pytest.fixture
    def values(self, schedule):
        return [value for _, value in schedule.graph.gradients]

    def test_after_the_launch_that_makes_it(self, schedule, values):
        launches = passes(schedule)
        turn = len(schedule.phase("forward"))
        places = arrival_places(launches, (), values, turn)
        assert places.keys() == set(values)
        for value, place in places.items():
            assert value in launches[place - 1].writes
            assert not any(value in launch.writes for launch in launches[place:])

    def test_after_the_join_of_its_branch(self, schedule, values):
        launches = passes(schedule)
        turn, branches = len(schedule.phase("forward")), branches_of(schedule)
        in_line = arrival_places(launches, (), values, turn)
        places = arrival_places(launches, branches, values, turn)
        beside = {branch.launch: branch for branch in branches}
        moved = 0
        for value, place in places.items():
            branch = beside.get(in_line[value] - 1)
            if branch is None or (branch.rest and value not in launches[branch.launch].rest):
                assert place == in_line[value]
            else:
                assert place == branch.join
                moved += 1
        assert moved  # weight gradients run beside each other

    def test_what_no_launch_of_the_pass_makes_is_there_at_its_start(self, schedule):
        launches = passes(schedule)
        turn = len(schedule.phase("forward"))
        name, _ = launches[0].step.outputs[0]
        assert arrival_places(launches, (Branch(0, -1, 3),), [name, "x"], turn) == {
            name: turn,
            "x": turn,
        }
