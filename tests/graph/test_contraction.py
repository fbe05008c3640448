"""Which casts a step may leave out, and what it is without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plantune.graph.builder import GraphBuilder
from plantune.graph.contraction import contracted
from plantune.graph.free_casts import rounding_casts
from plantune.graph.graph import Graph
from plantune.graph.ops.cast import INSERTED
from plantune.graph.step import Step, make_step
from plantune.graph.types import TensorType

SHAPE = (2, 3, 4, 4)
OURS: dict[str, Any] = {INSERTED: True}


class Nodes:
    """A graph of casts and pointwise ops on one image; each node is called by its op and place."""

    def __init__(self, dtype: str = "float32") -> None:
        self.builder = GraphBuilder()
        self.last = self.builder.input("x", TensorType(SHAPE, dtype))
        self.names: list[str] = []

    def cast(self, dtype: str, **mark: bool) -> Nodes:
        return self.op("cast", dtype=dtype, **mark)

    def op(self, op: str, *others: str, **attrs: Any) -> Nodes:
        (self.last,) = self.builder.emit(op, self.last, *others, **attrs)
        self.names.append(self.last)
        return self

    def graph(self, *more: str) -> Graph:
        return self.builder.build((self.last, *more))

    def step(self, *more: str) -> Step:
        return make_step(self.graph(*more), self.names)


def lines(step: Step) -> list[str]:
    return [f"{n.name} = {n.op}({', '.join(n.inputs)})" for n in step.nodes]


def test_a_step_without_free_casts_is_itself() -> None:
    step = Nodes().op("relu").op("sigmoid").step()
    assert contracted(step) is step


def test_casts_to_more_digits_are_nothing() -> None:
    step = contracted(Nodes("float16").cast("float32").op("relu").step())
    assert lines(step) == ["relu = relu(x)"]
    assert step.types["x"].dtype == "float16"
    assert step.types["relu"].dtype == "float32"


def test_the_step_stores_what_is_cast() -> None:
    step = contracted(Nodes().op("relu").cast("float16", **OURS).step())
    assert lines(step) == ["cast = relu(x)"]
    assert step.nodes[0].outputs == ("cast",)
    assert step.types["cast"].dtype == "float16"
    assert step.nodes[0].types[0].dtype == "float32"  # as eager computes it


def test_a_value_that_also_leaves_as_it_is_keeps_its_cast() -> None:
    step = contracted(Nodes().op("relu").cast("float16", **OURS).step("relu"))
    assert lines(step) == ["relu = relu(x)", "cast = cast(relu)"]


def test_a_copy_keeps_its_cast() -> None:
    step = contracted(Nodes().cast("float16", **OURS).step())
    assert lines(step) == ["cast = cast(x)"]


@pytest.mark.parametrize(
    ("mark", "made", "rounds"),
    [(OURS, ["relu = relu(x)"], ()), ({}, ["cast = cast(x)", "relu = relu(cast)"], ("cast",))],
)
def test_a_cast_of_the_users_rounds(mark: Any, made: list[str], rounds: tuple[str, ...]) -> None:
    step = Nodes().cast("float16", **mark).op("relu").step()
    assert lines(contracted(step)) == made
    assert rounding_casts(step) == rounds


def test_what_was_rounded_may_be_stored_wide() -> None:
    step = contracted(Nodes().op("relu").cast("float16").cast("float32").step())
    assert lines(step) == ["relu = relu(x)", "cast_2 = cast(relu)"]
    assert step.nodes[1].types[0].dtype == "float16"
    assert step.types["cast_2"].dtype == "float32"


def test_a_cast_of_the_users_at_the_end_is_how_the_result_is_stored() -> None:
    step = Nodes().op("relu").cast("bfloat16").step()
    assert lines(contracted(step)) == ["cast = relu(x)"]
    assert rounding_casts(step) == ()


@pytest.mark.parametrize("dtype", ["float64", "uint8"])
def test_what_is_not_computed_in_float32_stays(dtype: str) -> None:
    step = Nodes(dtype).cast("float32", **OURS).op("relu").step()
    assert contracted(step) is step


def test_two_casts_of_one_value_leave() -> None:
    nodes = Nodes().op("relu")
    (other,) = nodes.builder.emit("cast", "relu", dtype="bfloat16", **OURS)
    nodes.names.append(other)
    step = contracted(nodes.cast("float16", **OURS).step(other))
    assert lines(step) == ["cast = relu(x)", "cast_2 = cast(cast)"]


def test_other_results_of_a_node_keep_their_names() -> None:
    b = GraphBuilder()
    b.input("x", TensorType(SHAPE))
    (y, places) = b.emit(
        "max_pool2d", "x", kernel=(2, 2), stride=(2, 2), padding=(0, 0), dilation=(1, 1)
    )
    (cast,) = b.emit("cast", y, dtype="float16", **OURS)
    graph = b.build((cast, places))
    step = contracted(make_step(graph, [y, cast]))
    assert [n.outputs for n in step.nodes] == [(cast, places)]
    values = {"x": torch.randn(SHAPE, dtype=torch.float64)}
    expected = make_step(graph, [y, cast]).evaluate(values, torch.float64)
    made = step.evaluate(values, torch.float64)
    assert all(torch.equal(made[name], expected[name]) for name, _ in step.outputs)
