"""Steps that draw random numbers are checked on the same numbers, forward and backward."""

from __future__ import annotations

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.graph.graph import Graph
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.step import make_step
from plantune.kernels.family import Candidate
from plantune.measure.numerics import check

from .conftest import IMAGE, caught, output


@pytest.fixture
def dropout(step_of):
    attrs = {"arguments": '{"input":{"tensor":0},"p":0.5,"train":true}', "draws": "float32"}
    return step_of(lambda b: b.emit("aten.dropout.default", b.input("x", IMAGE), **attrs))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_right_step(dropout, space, layout):
    candidate = Candidate("framework", Attrs(layout=layout))
    assert check(dropout, candidate, space).deterministic


def test_other_numbers(dropout, fake, check_fake):
    def again(step, frame):
        output(step, frame).copy_(torch.dropout(frame.values["x"], 0.5, True))

    check_fake(dropout, fake(lambda step, frame: None))
    assert "relative error" in caught(check_fake, dropout, fake(again))


def test_numbers_that_must_be_chances(step_of, space):
    attrs = {"arguments": '{"self":{"tensor":0}}', "draws": "float32"}
    step = step_of(lambda b: b.emit("aten.bernoulli.default", b.input("x", IMAGE), **attrs))
    assert check(step, Candidate("framework", Attrs(layout="nchw")), space).error == 0


@pytest.mark.parametrize("place", [0, -1], ids=["forward", "backward"])
def test_a_training_step_alone(dropout, space, place):
    graph = Graph((("x", IMAGE),), (), (), dropout.nodes, (dropout.name,))
    node = differentiate(graph, ["x"]).nodes[place]
    step = make_step(differentiate(graph, ["x"]), [node.name])
    assert check(step, Candidate("framework", Attrs(layout="nchw")), space).deterministic
