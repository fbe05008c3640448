from __future__ import annotations

from dataclasses import replace

import pytest

from plantune.base.canonical import Attrs
from plantune.graph.builder import GraphBuilder
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan
from plantune.runtime.program.schedule import Conversion, make_schedule

GEOMETRY = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
NCHW, NHWC = (Candidate("framework", Attrs(layout=layout)) for layout in ("nchw", "nhwc"))


@pytest.fixture
def scheduled(space):
    """The schedule of the default plan with changed candidates by node."""

    def make(graph, **changed):
        plan = framework_plan(graph, space, network="test")
        choices = (replace(c, candidate=changed.get(c.nodes[0], c.candidate)) for c in plan.choices)
        plan = replace(plan, choices=tuple(choices))
        return make_schedule(check_plan(plan, graph, space))

    return make


def network(layout="nchw"):
    """relu, then two convolutions that read it, then their sum."""
    b = GraphBuilder()
    (y,) = b.emit("relu", b.input("x", TensorType((2, 3, 4, 4), layout=layout)))
    convs = []
    for name in ("v", "w"):
        weight = b.parameter(name, TensorType((3, 3, 1, 1)))
        convs += b.emit("conv2d", y, weight, **GEOMETRY)
    return b.build(b.emit("add", *convs))


def conversions(schedule):
    return {launch.step.name: launch.conversions for launch in schedule.launches}


def test_nothing_is_converted_where_layouts_agree(scheduled):
    schedule = scheduled(network())
    assert not any(conversions(schedule).values())
    assert set(schedule.layouts.values()) == {"nchw"}


def test_a_reader_that_demands_another_layout_gets_a_copy(scheduled):
    schedule = scheduled(network(), conv2d=NHWC)
    copy = Conversion("relu", "relu in nhwc", "nhwc")
    assert conversions(schedule) == {"relu": (), "conv2d": (copy,), "conv2d_2": (), "add": ()}
    reader = next(launch for launch in schedule.launches if launch.step.name == "conv2d")
    assert [name for name, _ in reader.step.inputs] == ["relu in nhwc", "v"]
    assert reader.step.nodes[0].inputs == ("relu in nhwc", "v")


def test_a_copy_is_made_once_for_all_its_readers(scheduled):
    schedule = scheduled(network(), conv2d=NHWC, conv2d_2=NHWC)
    assert [len(found) for found in conversions(schedule).values()] == [0, 1, 0, 0]
    reader = next(launch for launch in schedule.launches if launch.step.name == "conv2d_2")
    assert reader.step.nodes[0].inputs == ("relu in nhwc", "w")


def test_who_takes_any_layout_gets_none_converted(scheduled):
    """The sum reads one image in nhwc and one in nchw."""
    schedule = scheduled(network(), conv2d=NHWC)
    assert schedule.layouts["conv2d"] == "nhwc"
    assert schedule.layouts["conv2d_2"] == schedule.layouts["add"] == "nchw"


def test_the_layout_of_a_value_is_that_of_its_producer(scheduled):
    schedule = scheduled(network(), relu=NHWC, conv2d=NHWC, conv2d_2=NHWC, add=NHWC)
    assert not any(conversions(schedule).values())
    images = {name: schedule.layouts[name] for name in ("relu", "conv2d", "conv2d_2", "add")}
    assert set(images.values()) == {"nhwc"}
    assert schedule.layouts["v"] == "nchw"


def test_an_input_comes_in_its_own_layout(scheduled):
    b = GraphBuilder()
    x = b.input("x", TensorType((2, 3, 4, 4), layout="nhwc"))
    graph = b.build(b.emit("conv2d", x, b.parameter("w", TensorType((3, 3, 1, 1))), **GEOMETRY))
    assert not any(conversions(scheduled(graph, conv2d=NHWC)).values())
    assert conversions(scheduled(graph, conv2d=NCHW))["conv2d"] == (
        Conversion("x", "x in nchw", "nchw"),
    )


def test_phases_are_kept_apart(scheduled):
    b = GraphBuilder()
    x, w = b.input("x", TensorType((4, 3))), b.parameter("w", TensorType((3,)))
    (y,) = b.emit("mul_channel", x, *b.emit("affine", w, alpha=2.0, beta=0.0), axis=1)
    schedule = scheduled(b.build((y,)))
    assert [launch.step.ops for launch in schedule.phase("refresh")] == [("affine",)]
    assert [launch.step.ops for launch in schedule.phase("forward")] == [("mul_channel",)]
    assert schedule.phase("backward") == ()


def test_gradients_of_outputs_come_as_their_first_reader_wants_them(scheduled):
    """They are copied from the caller's in any case."""
    graph = differentiate(network())
    (seed,) = (name for name, _ in graph.output_gradients)
    reader = graph.consumers[seed][0].name
    assert scheduled(graph).layouts[seed] == "nchw"
    schedule = scheduled(graph, **{reader: NHWC})
    assert schedule.layouts[seed] == "nhwc"
    assert seed not in {copy.source for copy in conversions(schedule)[reader]}
