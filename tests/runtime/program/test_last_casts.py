"""Casts that end a backward pass are no steps where gradients are gathered in one launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.extract import extract_with_outputs
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan
from plantune.runtime.program.skipped_steps import without_last_casts
from plantune.space.search_space import load_search_space

CPU = load_search_space("cpu")


def made(module, wanted, *, casts=True):
    """The differentiated graph of a call under autocast, and a plan."""
    call = Arguments.of(module, (torch.randn(4, 3, 8, 8),), {})
    call = replace(call, autocast=("cpu", torch.bfloat16) if casts else None)
    graph = differentiate(extract_with_outputs(module, call, fold=False)[0], wanted)
    return graph, framework_plan(graph, CPU, network="small")


@pytest.fixture
def module():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))


def test_each_parameter_has_one(module):
    wanted = [name for name, _ in module.named_parameters()]
    graph, plan = made(module, wanted)
    fewer, shorter = without_last_casts(graph, plan)
    check_plan(shorter, fewer, CPU)
    assert len(plan.choices) - len(shorter.choices) == len(wanted)
    assert [name for name, _ in fewer.gradients] == [name for name, _ in graph.gradients]
    assert {fewer.types[value].dtype for _, value in fewer.gradients} == {"bfloat16"}


def test_the_gradient_of_an_input_keeps_its_own(module):
    graph, plan = made(module, [graph_input(module)])
    assert without_last_casts(graph, plan) == (graph, plan)


def graph_input(module):
    call = Arguments.of(module, (torch.randn(4, 3, 8, 8),), {})
    return extract_with_outputs(module, call, fold=False)[0].inputs[0][0]


def test_without_casts_nothing_changes(module):
    graph, plan = made(module, [name for name, _ in module.named_parameters()], casts=False)
    assert without_last_casts(graph, plan) == (graph, plan)
