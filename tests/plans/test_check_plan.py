"""A plan is compared with the graph that it is for, step by step."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from plantune.base.canonical import Attrs
from plantune.errors import InvalidPlan
from plantune.graph.graph import Graph
from plantune.kernels.family import Candidate
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan
from plantune.plans.plan import Choice, Plan
from plantune.space.search_space import load_search_space


def test_check_plan_gives_the_steps_in_running_order(plan, graph, space):
    checked = check_plan(replace(plan, choices=plan.choices[::-1]), graph, space)
    steps = checked.partition
    ran: set[str] = {name for name, _ in graph.sources}
    for step in steps:
        assert ran.issuperset(name for name, _ in step.inputs)
        ran.update(value for node in step.nodes for value in node.outputs)
    assert ran >= graph.results
    chosen = {each.name: each.candidate for each in checked.steps}
    for choice in plan.choices:
        step = next(step for step in steps if step.nodes[0].name in choice.nodes)
        assert chosen[step.name] == choice.candidate


def test_another_arch_is_refused(plan, graph, space):
    with pytest.raises(InvalidPlan, match="the plan is for cpu, this is sm90"):
        check_plan(plan, graph, load_search_space("sm90"))
    with pytest.raises(InvalidPlan, match="the plan is for sm90, this is cpu"):
        check_plan(replace(plan, problem=replace(plan.problem, arch="sm90")), graph, space)


def test_another_graph_is_refused(plan, graph, space):
    data = graph.to_json()
    data["inputs"][0][1]["layout"] = "nhwc"
    other = Graph.from_json(data)
    wanted = "for other layers (block, batch 2, infer, float32, cpu) than these"
    with pytest.raises(InvalidPlan, match=re.escape(wanted)):
        check_plan(plan, other, space)


def choice_of(plan, *nodes, family="framework", **config):
    return Choice(nodes, Candidate(family, Attrs(config or {"layout": "nchw"})))


def test_what_is_not_covered_is_named(plan, graph, space):
    missing = plan.choices[1].nodes[0]
    with pytest.raises(InvalidPlan, match=f"not covered: .*{missing}"):
        check_plan(replace(plan, choices=(plan.choices[0], *plan.choices[2:])), graph, space)


def test_what_is_covered_twice_is_named(plan, graph, space):
    twice = plan.choices[1].nodes[0]
    choices = (*plan.choices, choice_of(plan, twice))
    with pytest.raises(InvalidPlan, match=f"covered twice: .*{twice}"):
        check_plan(replace(plan, choices=choices), graph, space)


def test_an_unknown_node_is_named(plan, graph, space):
    choices = (*plan.choices, choice_of(plan, "nowhere"))
    with pytest.raises(InvalidPlan, match="nowhere"):
        check_plan(replace(plan, choices=choices), graph, space)


def test_steps_that_wait_for_each_other_are_refused(graph, space):
    plan = framework_plan(graph, space, network="block")
    names = [node.name for node in graph.nodes]
    ends = choice_of(plan, names[0], names[2])
    rest = [choice for choice in plan.choices if choice.nodes[0] not in ends.nodes]
    with pytest.raises(InvalidPlan, match="wait for each other"):
        check_plan(replace(plan, choices=(ends, *rest)), graph, space)


ILLEGAL = {
    "a family that is not there": ("cudnn", {}, "no kernel family is called 'cudnn'"),
    "a family that cannot": ("gemm", {"layout": "nchw"}, "gemm: only a 1x1 convolution"),
    "a config of nothing": ("framework", {}, "is not in the search space"),
    "a huge tile": ("framework", {"layout": "nchw", "tile_m": 10**9}, "is not in the search space"),
    "another type": ("onednn_conv", {"layout": "nchw", "prepack": 1}, "is not in the search space"),
    "text for a path": ("framework", {"layout": "../../etc"}, "is not in the search space"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_candidate_is_refused_with_its_step(graph, space, name):
    family, config, reason = ILLEGAL[name]
    plan = framework_plan(graph, space, network="block")
    index = next(i for i, c in enumerate(plan.choices) if c.nodes == ("conv1/conv2d",))
    bad = replace(plan.choices[index], candidate=Candidate(family, Attrs(config)))
    choices = (*plan.choices[:index], bad, *plan.choices[index + 1 :])
    text = replace(plan, choices=choices).dumps()
    with pytest.raises(InvalidPlan, match=r"step 'conv1/conv2d': .*") as caught:
        check_plan(Plan.loads(text), graph, space)
    assert reason in str(caught.value)


def test_an_arch_that_no_space_knows_is_refused(plan, graph, space):
    with pytest.raises(InvalidPlan, match="the plan is for sm999"):
        check_plan(replace(plan, problem=replace(plan.problem, arch="sm999")), graph, space)
