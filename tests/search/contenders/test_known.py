"""Plans of other batches and machines as a search's first contenders."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune.base.canonical import Attrs
from plantune.devices.machine import cpu_environment
from plantune.graph.fusions import fusions_named
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.plans.checked_plan import check_plan
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.guess import Preference, compose, framework_plan
from plantune.plans.plan import Choice
from plantune.plans.problem import Problem
from plantune.runtime.program.program import Program
from plantune.search.contenders import known
from plantune.search.contenders.fitting import fitted
from plantune.search.contenders.known import incumbent, known_plans
from plantune.search.sought import Sought

HERE = cpu_environment()
ELSEWHERE = replace(HERE, device="Another CPU", device_digest="another")


def graph_of(module, batch):
    return extract(module, TensorType((batch, 4, 8, 8)))


@pytest.fixture
def module(graph):
    from ..conftest import Small

    return Small().eval()


@pytest.fixture
def found(space):
    """What a search found for a batch: fused convolutions of oneDNN's."""

    def plan(graph, prepack=True):
        made = compose(
            graph,
            space,
            network="small",
            fusions=fusions_named("conv_epilogue"),
            preferences=(Preference("onednn_conv", {"layout": "nhwc", "prepack": prepack}),),
            origin="measured",
        )
        return replace(made, evidence=Attrs(median_ms=1.0))

    return plan


@pytest.fixture
def database():
    with PlanDatabase.in_memory() as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch):
    monkeypatch.setattr(known, "stored_plans_in", lambda path: [])


def families(plan):
    return [choice.candidate.family for choice in plan.choices]


class TestFitted:
    def test_another_batch_gets_the_same_steps(self, module, found, space):
        graph = graph_of(module, 8)
        plan = fitted(found(graph_of(module, 2)), graph, space)
        check_plan(plan, graph, space)
        assert sorted(map(repr, plan.choices)) == sorted(map(repr, found(graph).choices))
        assert (plan.problem.batch, plan.origin) == (8, "measured")
        assert plan.problem.graph == graph.digest
        assert dict(plan.evidence) == {}

    def test_it_computes_the_network(self, module, found, space):
        graph, x = graph_of(module, 8), torch.randn(8, 4, 8, 8)
        plan = fitted(found(graph_of(module, 2)), graph, space)
        program = Program(check_plan(plan, graph, space))
        program.refresh(dict(module.named_parameters()))
        (y,) = program.forward(x)
        torch.testing.assert_close(y, module(x).detach(), rtol=1e-4, atol=1e-5)

    def test_a_config_that_is_illegal_here_becomes_the_nearest_of_its_family(
        self, module, found, space
    ):
        graph = graph_of(module, 8)
        plan = found(graph_of(module, 2))
        odd = Candidate("onednn_conv", Attrs(layout="nhwc", prepack=True, blocks=7))
        choices = tuple(
            Choice(c.nodes, odd) if c.candidate.family == "onednn_conv" else c for c in plan.choices
        )
        assert fitted(replace(plan, choices=choices), graph, space) == fitted(plan, graph, space)

    def test_a_family_that_cannot_run_falls_back_to_the_framework(self, module, found, space):
        graph = graph_of(module, 8)
        plan = found(graph_of(module, 2))
        first, *rest = plan.choices
        gone = Choice(first.nodes, Candidate("stem", Attrs()))
        made = fitted(replace(plan, choices=(gone, *rest)), graph, space)
        check_plan(made, graph, space)
        assert families(made).count("onednn_conv") == families(plan).count("onednn_conv") - 1

    def test_a_plan_of_the_framework_alone_says_nothing(self, module, space):
        plan = framework_plan(graph_of(module, 2), space, network="small")
        assert fitted(plan, graph_of(module, 8), space) is None

    def test_another_network_and_another_arch_do_not_fit(self, module, found, space):
        plan = found(graph_of(module, 2))
        assert fitted(plan, graph_of(nn.Sequential(nn.ReLU()), 2), space) is None
        other = replace(plan, problem=replace(plan.problem, arch="sm90"))
        assert fitted(other, graph_of(module, 2), space) is None


class TestKnown:
    @pytest.fixture
    def known_for(self, database, space):
        def plans(graph, **options):
            problem = Problem.of(graph, "cpu", "small")
            return known_plans(Sought(graph, problem), HERE, database, **options)

        return plans

    def test_of_an_empty_database_nothing(self, module, known_for):
        assert known_for(graph_of(module, 2)) == []

    def test_the_problems_own_come_first_then_the_nearest_batch(
        self, module, found, database, known_for
    ):
        graph = graph_of(module, 8)
        for batch, prepack in ((64, True), (8, False), (4, True)):
            database.put_plan(found(graph_of(module, batch), prepack), HERE)
        first, second = known_for(graph)
        assert first.choices == fitted(found(graph, prepack=False), graph, _space()).choices
        assert set(second.choices) == set(found(graph).choices)

    def test_an_interrupted_plan_counts(self, module, found, database, known_for):
        database.put_plan(found(graph_of(module, 4)), HERE, partial=True)
        assert len(known_for(graph_of(module, 8))) == 1

    def test_shipped_plans_count_unless_left_out(self, module, found, monkeypatch, known_for):
        with PlanDatabase.in_memory() as other:
            other.put_plan(found(graph_of(module, 4)), ELSEWHERE)
            shipped = list(other.plans())
        monkeypatch.setattr(known, "stored_plans_in", lambda path: shipped)
        assert len(known_for(graph_of(module, 8))) == 1
        assert known_for(graph_of(module, 8), shipped=False) == []

    def test_those_of_other_machines_are_left_out_too(self, module, found, database, known_for):
        database.put_plan(found(graph_of(module, 4)), ELSEWHERE)
        assert len(known_for(graph_of(module, 8))) == 1
        assert known_for(graph_of(module, 8), shipped=False) == []

    @pytest.mark.parametrize(
        "change", [{"mode": "train"}, {"dtype": "float64"}, {"network": "other"}], ids=str
    )
    def test_what_is_for_something_else_does_not(self, module, found, database, known_for, change):
        plan = found(graph_of(module, 4))
        other = replace(plan, problem=replace(plan.problem.key, **change))
        database.put_plan(other, HERE)
        assert known_for(graph_of(module, 8)) == []


def test_a_plan_of_the_same_layers_is_known_under_the_names_of_this_network(
    module, found, database, space
):
    database.put_plan(found(graph_of(module, 2)), HERE)
    inside = graph_of(nn.Sequential(module), 2)
    (plan,) = known_plans(Sought(inside, Problem.of(inside, "cpu", "other")), HERE, database)
    assert plan.problem.graph == inside.digest
    assert {name for c in plan.choices for name in c.nodes} == {n.name for n in inside.nodes}


class TestIncumbent:
    def test_it_is_what_calls_find(self, module, found, database, space):
        graph = graph_of(module, 2)
        problem = Problem.of(graph, "cpu", "small")
        assert incumbent(Sought(graph, problem), HERE, database) is None
        plan = found(graph)
        database.put_plan(plan, HERE)
        assert incumbent(Sought(graph, problem), HERE, database) == plan

    def test_a_predicted_one_is_none(self, module, found, database, space):
        graph = graph_of(module, 2)
        database.put_plan(replace(found(graph), origin="predicted"), HERE)
        problem = Problem.of(graph, "cpu", "small")
        assert incumbent(Sought(graph, problem), HERE, database) is None


def _space():
    from plantune.space.search_space import load_search_space

    return load_search_space("cpu")
