"""What a layer graph is: its rules, its JSON, its digest, and what it knows of its values."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest

from plantune.base.canonical import Attrs, canonical, digest
from plantune.errors import InvalidGraph
from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph, Node
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.types import TensorType

MATRIX = TensorType((4, 3))
SQUARE = TensorType((3, 3))
VECTOR = TensorType((3,))


def forward_graph() -> Graph:
    """relu(batch_norm(x @ w)) + s, whose statistics are updated."""
    b = GraphBuilder()
    b.input("x", MATRIX)
    for name, type_ in [("w", SQUARE), ("scale", VECTOR), ("shift", VECTOR), ("s", VECTOR)]:
        b.parameter(name, type_)
    b.buffer("mean", VECTOR)
    b.buffer("var", VECTOR)
    (scaled,) = b.emit("mul_channel", "w", "s", axis=0)
    (y,) = b.emit("matmul", "x", scaled, transpose_a=False, transpose_b=False)
    norm = ("scale", "shift", "mean", "var")
    y, _, _, mean, var = b.emit("batch_norm", y, *norm, eps=1e-5, momentum=0.1)
    (y,) = b.emit("relu", y, place="layers.0")
    b.updates = [("mean", mean), ("var", var)]
    return b.build((y,))


def training_graph() -> Graph:
    return differentiate(forward_graph(), ["x", "w", "scale", "s"])


GRAPHS = [forward_graph, training_graph]


@pytest.mark.parametrize("build", GRAPHS)
def test_json_is_exact_also_through_text(build: Any) -> None:
    graph = build()
    again = Graph.from_json(json.loads(json.dumps(graph.to_json())))
    assert again == graph
    assert again.digest == graph.digest
    assert canonical(again.to_json()) == canonical(graph.to_json())
    assert build().digest == graph.digest


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda graph: pickle.loads(pickle.dumps(graph))])
def test_copies_are_equal(copier: Any) -> None:
    graph = training_graph()
    assert graph.types  # a cached value must not hinder
    assert copier(graph) == graph


CHANGED_TYPE = {"shape": (3, 4), "dtype": "float16", "layout": "nhwc"}
CHANGED_NODE = {
    "name": "other",
    "op": "sub",
    "inputs": ("b", "a"),
    "types": (SQUARE,),
    "attrs": Attrs(axis=1),
}


def changed_graph(name: str) -> tuple[Graph, Graph]:
    """A graph and one that differs in this field alone; a new field needs a line here."""
    forward, training = forward_graph(), training_graph()
    extra = ("extra", VECTOR)
    renamed = (replace(forward.nodes[0], attrs=Attrs(axis=1)), *forward.nodes[1:])
    return {
        "inputs": (forward, replace(forward, inputs=(*forward.inputs, extra))),
        "parameters": (forward, replace(forward, parameters=(*forward.parameters, extra))),
        "buffers": (forward, replace(forward, buffers=(*forward.buffers, extra))),
        "nodes": (forward, replace(forward, nodes=renamed)),
        "outputs": (forward, replace(forward, outputs=forward.outputs * 2)),
        "updates": (forward, replace(forward, updates=forward.updates[:1])),
        "backward_from": (forward, replace(forward, backward_from=len(forward.nodes))),
        "output_gradients": (
            training,
            replace(training, output_gradients=(*training.output_gradients, extra)),
        ),
        "gradients": (training, replace(training, gradients=training.gradients[1:])),
    }[name]


@pytest.mark.parametrize("name", [field.name for field in fields(Graph)])
def test_digest_changes_with_every_field_of_a_graph(name: str) -> None:
    before, after = changed_graph(name)
    same = [f.name for f in fields(Graph) if getattr(before, f.name) == getattr(after, f.name)]
    assert set(same) == {f.name for f in fields(Graph)} - {name}
    assert before.digest != after.digest


@pytest.mark.parametrize("name", [field.name for field in fields(Node)])
def test_digest_changes_with_every_field_of_a_node(name: str) -> None:
    node = Node("add", "add", ("a", "b"), (VECTOR,))
    other = replace(node, **{name: CHANGED_NODE[name]})
    assert digest(node.to_json()) != digest(other.to_json())
    assert Node.from_json(json.loads(canonical(other.to_json()))) == other


@pytest.mark.parametrize("name", [field.name for field in fields(TensorType)])
def test_digest_changes_with_every_field_of_a_type(name: str) -> None:
    type_ = TensorType((4, 3, 1, 1))
    changed = {**CHANGED_TYPE, "shape": (3, 4, 1, 1)}[name]
    other = replace(type_, **{name: changed})
    assert digest(type_.to_json()) != digest(other.to_json())


@pytest.mark.parametrize("key", forward_graph().to_json())
def test_every_field_is_in_the_json(key: str) -> None:
    assert list(forward_graph().to_json()) == [field.name for field in fields(Graph)]
    data = forward_graph().to_json()
    del data[key]
    with pytest.raises(InvalidGraph, match=f"not a layer graph: KeyError.*{key}"):
        Graph.from_json(data)


def node(name: str, op: str, *inputs: str, type_: TensorType = MATRIX) -> Node:
    return Node(name, op, inputs, (type_,))


RELU = node("y", "relu", "x")
# The fields that make a graph wrong, and what the message says.
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"inputs": (("x", MATRIX), ("x", MATRIX))}, "value 'x' is there twice"),
    ({"parameters": (("x", MATRIX),)}, "value 'x' is there twice"),
    ({"inputs": ((3, MATRIX),)}, "a name is a string that is not empty, got 3"),
    ({"nodes": (node("", "relu", "x"),)}, "a name is a string that is not empty, got ''"),
    ({"nodes": (node("y", "swish", "x"),)}, "op 'swish' is neither one of add"),
    ({"nodes": (node("y", "relu", "z"),)}, r"node 'y' reads \['z'\], which nothing before it"),
    ({"nodes": (node("y", "relu", "y"),)}, r"node 'y' reads \['y'\], which nothing before it"),
    ({"nodes": (node("a", "relu", "y"), RELU)}, r"node 'a' reads \['y'\]"),
    ({"nodes": (node("y", "relu", "x", "x"),)}, "node 'y': relu takes 1 inputs, got 2"),
    ({"nodes": (node("y", "add", "x"),)}, "node 'y': add takes 2 inputs, got 1"),
    ({"nodes": (node("y", "relu", "x", type_=VECTOR),)}, "node 'y' makes .* but says"),
    ({"nodes": (Node("y", "relu", ("x",), ()),)}, "node 'y' makes .* but says"),
    ({"nodes": (RELU, RELU)}, "value 'y' is there twice"),
    ({"nodes": (node("x", "relu", "x"),)}, "value 'x' is there twice"),
    ({"outputs": ("z",)}, "result 'z' is made by no node"),
    ({"updates": (("b", "z"),)}, "result 'z' is made by no node"),
    ({"updates": (("b", "x"),)}, "'x' cannot stand for 'b'"),
    ({"updates": (("x", "y"),)}, "'y' stands for 'x', which is not a buffer, or is there twice"),
    ({"updates": (("b", "b"), ("b", "b"))}, "'b' stands for 'b', which is .* there twice"),
    ({"gradients": (("x", "y"),)}, "gradients need a backward pass: backward_from is None"),
    ({"output_gradients": (("d", MATRIX),)}, "gradients need a backward pass"),
    ({"backward_from": 1, "gradients": (("b", "b"),)}, "'b', which is not an input or a parameter"),
    ({"backward_from": 1, "gradients": (("x", "b"),)}, "'b' cannot stand for 'x'"),
    ({"backward_from": 2}, "backward_from 2 is outside of the nodes"),
    ({"backward_from": -1}, "backward_from -1 is outside of the nodes"),
    ({"backward_from": True}, "backward_from True is outside of the nodes"),
    ({"backward_from": 0}, "'y' leaves the forward pass, but the backward pass makes it"),
    ({"backward_from": 0, "outputs": (), "updates": (("b", "s"),)}, "'s' leaves the forward"),
    (
        {"backward_from": 1, "inputs": (), "output_gradients": (("x", MATRIX),)},
        "node 'y' of the forward pass reads an output's gradient",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_refuses(change: dict[str, Any], message: str) -> None:
    summed = Node("s", "sum", ("x",), (VECTOR,), Attrs(dims=(0,), keepdim=False))
    nodes = (summed,) if change.get("updates") == (("b", "s"),) else (RELU,)
    whole = {
        "inputs": (("x", MATRIX),),
        "parameters": (),
        "buffers": (("b", VECTOR),),
        "nodes": nodes,
        "outputs": ("y",),
    }
    if nodes == (RELU,):
        Graph(**whole)
    with pytest.raises(InvalidGraph, match=message):
        Graph(**{**whole, **change})


def test_output_names_of_a_node_with_several_values() -> None:
    norm = forward_graph().nodes[2]
    names = ("batch_norm", "batch_norm:1", "batch_norm:2", "batch_norm:3", "batch_norm:4")
    assert norm.outputs == names
    assert forward_graph().producers["batch_norm:3"] is not None


def test_consumers_are_the_readers_in_order_each_once() -> None:
    b = GraphBuilder()
    b.input("x", MATRIX)
    (twice,) = b.emit("add", "x", "x")
    (y,) = b.emit("mul", "x", twice)
    graph = b.build((y,))
    assert {k: [n.name for n in v] for k, v in graph.consumers.items()} == {
        "x": ["add", "mul"],
        "add": ["mul"],
        "mul": [],
    }


def test_constants_follow_from_weights_that_the_graph_does_not_move() -> None:
    constants = forward_graph().constants
    assert constants == {"w", "scale", "shift", "s", "mul_channel"}
    still = replace(forward_graph(), updates=())
    assert still.constants == constants | {"mean", "var"}
    assert training_graph().constants == constants


def test_a_backward_node_is_not_a_constant_even_where_it_reads_constants_alone() -> None:
    b = GraphBuilder()
    b.parameter("w", SQUARE)
    (y,) = b.emit("relu", "w")
    assert b.build((y,)).constants == {"w", y}
    assert b.build((), backward_from=0, gradients=(("w", y),)).constants == {"w"}


def test_builder_makes_unique_names_and_keeps_reserved_ones_free() -> None:
    b = GraphBuilder()
    b.reserved = frozenset(["relu_2"])
    b.input("x", MATRIX)
    names = [b.emit("relu", "x")[0] for _ in range(3)]
    assert names == ["relu", "relu_3", "relu_4"]
    assert b.emit("relu", "x", place="a.b") == ("a.b/relu",)
