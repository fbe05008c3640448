"""Casts that are not in the user's code are marked, in no digest by which plans are found."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from plantune.base.canonical import Attrs
from plantune.graph.graph import Graph
from plantune.graph.ops.cast import INSERTED
from plantune.graph.partition import one_by_one
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.step import Step, make_step
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.extract import extract_with_outputs
from plantune.graph.types import TensorType

HALF = ("cuda", torch.float16)


class Scaled(nn.Module):
    """A product, a learned scale, and a cast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.scale
        return self.layer(y - y.half())


def graph_of(module: nn.Module, *, trains: bool = False) -> Graph:
    arguments = Arguments((TensorType((4, 8)),), autocast=HALF)
    graph = extract_with_outputs(module.train(trains), arguments)[0]
    return differentiate(graph) if trains else graph


def casts(graph: Graph) -> dict[str, bool]:
    """Whether each cast is marked."""
    return {n.name: INSERTED in n.attrs for n in graph.nodes if n.op == "cast"}


def unmarked(graph: Graph) -> Graph:
    """The graph as earlier releases wrote it."""
    nodes = [replace(n, attrs=Attrs(n.identity)) for n in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


def test_all_but_the_users_own_are_marked() -> None:
    found = casts(graph_of(Scaled()))
    own = [name for name, inserted in found.items() if not inserted]
    assert len(own) == 1
    assert len(found) >= 6


def test_gradients_of_casts_are_marked_as_these_are() -> None:
    graph = graph_of(Scaled(), trains=True)
    types = graph.types
    backward = {
        name: inserted for name, inserted in casts(graph).items() if name in graph.backward_nodes
    }
    assert sorted(backward.values()).count(False) == 1 < sum(backward.values())
    (own,) = (name for name, inserted in backward.items() if not inserted)
    assert types[own].dtype == "float32"


@pytest.mark.parametrize("trains", [False, True])
def test_they_are_in_no_digest(trains: bool) -> None:
    graph = graph_of(Scaled(), trains=trains)
    plain = unmarked(graph)
    assert plain != graph
    assert not any(casts(plain).values())
    assert plain.structure == graph.structure
    assert plain.named_digest == graph.named_digest
    of_graph, of_plain = ([step.signature for step in one_by_one(each)] for each in (graph, plain))
    assert of_graph == of_plain


def test_a_step_that_rounds_within_is_another_one() -> None:
    graph = graph_of(Scaled())
    (own,) = (name for name, inserted in casts(graph).items() if not inserted)
    place = graph.positions[own]
    names = [node.name for node in graph.nodes[place - 1 : place + 3]]
    step = make_step(graph, names)
    marked = [
        replace(n, attrs=Attrs(n.attrs, **{INSERTED: True})) if n.name == own else n
        for n in step.nodes
    ]
    assert step.ops == ("mul", "cast", "cast", "sub")
    assert replace(step, nodes=tuple(marked)).signature != step.signature


def test_json_keeps_them_and_reads_what_has_none() -> None:
    graph = graph_of(Scaled(), trains=True)
    for each in (graph, unmarked(graph)):
        assert Graph.from_json(json.loads(json.dumps(each.to_json()))) == each
        for step in one_by_one(each):
            assert Step.from_json(json.loads(json.dumps(step.to_json()))) == step
