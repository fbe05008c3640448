"""The cheapest cover is found: checked against trying all of them."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from plantune.base.canonical import Attrs
from plantune.errors import InvalidGraph
from plantune.graph.fusions import all_fusions
from plantune.graph.partition import alternatives, partition_into
from plantune.graph.step import Step, make_step
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.conversions import conversion_cost
from plantune.kernels.family import Candidate
from plantune.plans.planner.cover import (
    BEAM,
    MOST_STATES,
    NARROW_BEAM,
    beam_for,
    best_covers,
)
from plantune.space.arch import load_arch

CONVERSION = conversion_cost(load_arch("cpu"))


@dataclass(frozen=True)
class InLayout:
    """A candidate of no family, whose images have one layout."""

    step: Step
    candidate: Candidate
    demands: dict[str, str]
    makes: dict[str, str]

    @property
    def nodes(self):
        return tuple(node.name for node in self.step.nodes)


def priced(step, cost_us, layout):
    images = {n for n, t in (*step.inputs, *step.outputs) if len(t.shape) == 4} - step.constants
    outputs = {name for name, _ in step.outputs}
    found = InLayout(
        step,
        Candidate("fake", Attrs(layout=layout)),
        dict.fromkeys(images - outputs, layout),
        dict.fromkeys(images & outputs, layout),
    )
    return found, cost_us


def cost_of(graph, cover, costs):
    """Steps and conversions, by following the layouts in running order."""
    layouts = {name: type_.layout for name, type_ in graph.inputs}
    us = {(item.nodes, item.candidate): cost_us for item, cost_us in costs}
    chosen = {item.step.name: item for item in cover}
    total = 0.0
    for node in graph.nodes:
        if node.name not in chosen:
            continue
        item = chosen[node.name]
        total += us[item.nodes, item.candidate]
        for name, layout in item.demands.items():
            if layouts.get(name, layout) != layout:
                total += CONVERSION.time_us(graph.types[name])
        layouts.update(item.makes)
    return total


def all_covers(graph, costs):
    """Every set of candidates that covers each node once and can run."""
    names = [node.name for node in graph.nodes]

    def grow(covered, chosen):
        rest = [name for name in names if name not in covered]
        if not rest:
            yield chosen
            return
        for item, _ in costs:
            mine = set(item.nodes)
            if item.step.name == rest[0] and covered.isdisjoint(mine):
                yield from grow(covered | mine, (*chosen, item))

    for cover in grow(frozenset(), ()):
        try:
            partition_into(graph, [item.nodes for item in cover])
        except InvalidGraph:
            continue
        yield cover


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_best_of_all(graph, seed):
    draw = random.Random(seed)
    steps = alternatives(graph, all_fusions())
    costs = [
        priced(step, draw.uniform(1, 40) * len(step.nodes) ** 0.5, layout)
        for step, layout in itertools.product(steps, ("nchw", "nhwc"))
    ]
    expected = min(cost_of(graph, cover, costs) for cover in all_covers(graph, costs))
    cost, cover = best_covers(graph, costs, 1, CONVERSION)[0]
    assert cost == pytest.approx(expected)
    assert cost_of(graph, cover, costs) == pytest.approx(expected)


def test_the_next_best_follow_in_order(graph):
    draw = random.Random(0)
    costs = [
        priced(step, draw.uniform(1, 40), "nchw") for step in alternatives(graph, all_fusions())
    ]
    totals = sorted(cost_of(graph, cover, costs) for cover in all_covers(graph, costs))
    found = best_covers(graph, costs, 3, CONVERSION)
    assert [cost for cost, _ in found] == pytest.approx(totals[:3])


def test_a_conversion_has_its_price(graph):
    """The second convolution is a little faster in nhwc, but less than a conversion costs."""
    steps = [step for step in alternatives(graph, all_fusions()) if len(step.nodes) == 1]
    costs = [priced(step, 10.0, "nchw") for step in steps]
    conv2 = next(step for step in steps if step.name == "conv2/conv2d")
    price = CONVERSION.time_us(graph.types["conv2/conv2d"])
    saved = [priced(conv2, 10.0 - price / 2, "nhwc")]
    _, cover = best_covers(graph, costs + saved, 1, CONVERSION)[0]
    assert {chosen.candidate.config["layout"] for chosen in cover} == {"nchw"}
    saved = [priced(conv2, 10.0 - 3 * price, "nhwc")]
    _, cover = best_covers(graph, costs + saved, 1, CONVERSION)[0]
    assert {o.step.name for o in cover if o.candidate.config["layout"] == "nhwc"} == {conv2.name}


def test_without_an_option_for_a_node_there_is_no_cover(graph):
    steps = [step for step in alternatives(graph, all_fusions()) if "relu" not in step.ops]
    assert best_covers(graph, [priced(step, 1.0, "nchw") for step in steps], 1, CONVERSION) == []


def test_an_option_that_costs_infinitely_much_is_never_needed(graph):
    steps = alternatives(graph, all_fusions())
    costs = [priced(step, math.inf if len(step.nodes) > 1 else 1.0, "nchw") for step in steps]
    cost, cover = best_covers(graph, costs, 1, CONVERSION)[0]
    assert cost == len(graph.nodes)
    assert all(len(item.step.nodes) == 1 for item in cover)


@pytest.mark.parametrize(
    ("nodes", "beam"), [(5, BEAM), (512, MOST_STATES // 512), (1 << 20, NARROW_BEAM)]
)
def test_a_deep_graph_keeps_fewer_states_a_node(nodes, beam):
    assert beam_for(SimpleNamespace(nodes=range(nodes))) == beam


def test_few_states_find_the_best_of_a_chain(graph):
    draw = random.Random(1)
    steps = alternatives(graph, all_fusions())
    costs = [priced(step, draw.uniform(1, 40), "nchw") for step in steps]
    (wide,), (narrow,) = (best_covers(graph, costs, 1, CONVERSION, beam) for beam in (BEAM, 4))
    assert narrow[0] == pytest.approx(wide[0])


class Deep(nn.Module):
    """Gates, of which one kernel may do much: a chain of small ops beside an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * torch.sigmoid(x) + x
        return x


def test_a_large_group_is_not_lost_beside_states_that_have_done_less():
    """It has paid for all of its nodes, the others for those up to here."""
    graph = extract(Deep().eval(), TensorType((2, 8)))
    names = [node.name for node in graph.nodes]
    alone = [priced(make_step(graph, [name]), 1.0, "nchw") for name in names]
    pairs = [priced(make_step(graph, pair), 1.9, "nchw") for pair in itertools.pairwise(names)]
    whole = priced(make_step(graph, names), 0.5 * len(names), "nchw")
    ((cost_us, cover),) = best_covers(graph, [*alone, *pairs, whole], 1, CONVERSION, beam=1)
    assert cost_us == 0.5 * len(names)
    assert cover == (whole[0],)
