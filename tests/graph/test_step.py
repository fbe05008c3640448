"""What a step covers, what enters and leaves it, and when two steps do the same work."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from plantune.errors import InvalidGraph
from plantune.graph.builder import GraphBuilder
from plantune.graph.fusions import all_fusions
from plantune.graph.graph import Graph
from plantune.graph.partition import fused, one_by_one
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.step import Step, make_step
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.models.resnet import resnet18

X, W = TensorType((2, 3)), TensorType((3, 4))
DOUBLE = TensorType((2, 3), "float64")


def graph(affine: dict[str, Any] | None = None, **types: TensorType) -> Graph:
    """out = sigmoid(relu(x @ (w * 2)) * alpha + beta) - relu, and the relu too."""
    b = GraphBuilder()
    b.input("x", types.get("x", X))
    b.parameter("w", types.get("w", W))
    (w,) = b.emit("affine", "w", alpha=2.0, beta=0.0)
    (y,) = b.emit("matmul", "x", w, transpose_a=False, transpose_b=False)
    (r,) = b.emit("relu", y)
    (a,) = b.emit("affine", r, **(affine or {"alpha": 0.5, "beta": 1.0}))
    (s,) = b.emit("sigmoid", a)
    (out,) = b.emit("sub", s, r)
    return b.build((out, r))


def test_what_enters_and_leaves() -> None:
    whole = graph()
    step = make_step(whole, ["affine_2", "relu", "matmul"])
    assert [node.name for node in step.nodes] == ["matmul", "relu", "affine_2"]
    assert step.name == "matmul"
    assert step.ops == ("matmul", "relu", "affine")
    assert [name for name, _ in step.inputs] == ["x", "affine"]
    assert [name for name, _ in step.outputs] == ["relu", "affine_2"]
    assert step.internal == ("matmul",)
    assert step.constants == {"affine"}
    assert step.phase == "forward"
    # A result of the graph leaves, also where all of its readers are inside.
    tail = make_step(whole, ["relu", "affine_2", "sigmoid", "sub"])
    assert [name for name, _ in tail.outputs] == ["relu", "sub"]


@pytest.mark.parametrize(
    ("node", "phase"),
    [("affine", "refresh"), ("relu", "forward"), ("d(relu)/relu_grad", "backward")],
)
def test_phases(node: str, phase: str) -> None:
    assert make_step(differentiate(graph()), [node]).phase == phase


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no step can cover nothing"),
        (["relu", "no"], r"no step can cover \['no'\]"),
        (["affine", "matmul"], r"belong to several phases: \['forward', 'refresh'\]"),
        (["relu", "d(relu)/relu_grad"], r"several phases: \['backward', 'forward'\]"),
    ],
)
def test_refuses(names: list[str], message: str) -> None:
    with pytest.raises(InvalidGraph, match=message):
        make_step(differentiate(graph()), names)


def test_evaluate_is_the_meaning_of_its_nodes() -> None:
    x, w = torch.randn(2, 3), torch.randn(3, 4)
    step = make_step(graph(), ["matmul", "relu", "affine_2"])
    known = step.evaluate({"x": x, "affine": w})
    torch.testing.assert_close(known["affine_2"], torch.relu(x @ w) * 0.5 + 1)


def test_costs() -> None:
    step = make_step(graph(), ["matmul", "relu", "affine_2"])
    assert step.flops == 2 * 2 * 3 * 4 + 8 + 8
    # x and w are read, relu and affine_2 are written; the product stays inside.
    assert step.traffic_bytes == 4 * (6 + 12 + 8 + 8)
    half = graph(x=TensorType((2, 3), "float16"), w=TensorType((3, 4), "float16"))
    assert make_step(half, ["matmul"]).traffic_bytes == 2 * (6 + 12 + 8)


def test_renamed_reads_other_values_and_does_the_same() -> None:
    step = make_step(graph(), ["matmul", "relu"])
    other = step.renamed({"affine": "packed", "unread": "z"})
    assert [name for name, _ in other.inputs] == ["x", "packed"]
    assert other.constants == {"packed"}
    assert other.signature == step.signature
    x, w = torch.randn(2, 3), torch.randn(3, 4)
    expected = step.evaluate({"x": x, "affine": w})["relu"]
    assert torch.equal(other.evaluate({"x": x, "packed": w})["relu"], expected)


def test_json_is_exact_also_through_text() -> None:
    for step in one_by_one(differentiate(graph())):
        data = json.loads(json.dumps(step.to_json()))
        assert Step.from_json(data) == step
        for key in data:
            with pytest.raises(InvalidGraph, match="this is not a step"):
                Step.from_json({name: value for name, value in data.items() if name != key})
            with pytest.raises(InvalidGraph):
                Step.from_json({**data, key: 3})


def steps_of(module: nn.Module, prefix: str) -> list[str]:
    whole = extract(module.eval(), TensorType((2, 3, 64, 64)))
    return [s.signature for s in fused(whole, all_fusions()) if s.name.startswith(prefix)]


def test_equal_blocks_have_equal_signatures_wherever_they_stand() -> None:
    module = resnet18()
    first, second = steps_of(module, "layer1.0"), steps_of(module, "layer1.1")
    assert first == second != []
    assert len(set(steps_of(module, "layer1"))) < len(steps_of(module, "layer1")) / 2
    assert set(first).isdisjoint(steps_of(module, "layer2.0"))


def signature(whole: Graph, *names: str) -> str:
    return make_step(whole, names).signature


def pair(
    first: str, second: str, op: str = "sub", kinds: tuple[str, str] = ("input", "input")
) -> Graph:
    """One op on two of the sources a and b."""
    b = GraphBuilder()
    for name, kind in zip("ab", kinds, strict=True):
        getattr(b, kind)(name, X)
    return b.build(b.emit(op, first, second))


AFFINE = ("relu", "affine_2")
DIFFERENT: dict[str, tuple[Callable[[], str], Callable[[], str]]] = {
    "an attribute": (
        lambda: signature(graph(), *AFFINE),
        lambda: signature(graph({"alpha": 0.5, "beta": 1.5}), *AFFINE),
    ),
    "an attribute's type": (
        lambda: signature(graph({"alpha": 1.0, "beta": 2.0}), *AFFINE),
        lambda: signature(graph({"alpha": 1, "beta": 2.0}), *AFFINE),
    ),
    "a shape": (
        lambda: signature(graph(), "relu"),
        lambda: signature(graph(x=TensorType((3, 3))), "relu"),
    ),
    "a dtype": (
        lambda: signature(graph(), "relu"),
        lambda: signature(graph(x=DOUBLE, w=replace(W, dtype="float64")), "relu"),
    ),
    "an op": (
        lambda: signature(pair("a", "b", "add"), "add"),
        lambda: signature(pair("a", "b", "sub"), "sub"),
    ),
    "which operand is constant": (
        lambda: signature(pair("a", "b", kinds=("parameter", "input")), "sub"),
        lambda: signature(pair("a", "b", kinds=("input", "parameter")), "sub"),
    ),
    "constness": (
        lambda: signature(pair("a", "b"), "sub"),
        lambda: signature(pair("a", "b", kinds=("input", "parameter")), "sub"),
    ),
    "one value read twice": (
        lambda: signature(pair("a", "b"), "sub"),
        lambda: signature(pair("a", "a"), "sub"),
    ),
    "the phase": (
        lambda: signature(pair("a", "b"), "sub"),
        lambda: signature(replace(pair("a", "b"), backward_from=0, outputs=()), "sub"),
    ),
    "what leaves": (
        lambda: signature(graph(), "matmul", "relu"),
        lambda: signature(replace(graph(), outputs=("sub", "matmul")), "matmul", "relu"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT)
def test_other_work_has_another_signature(case: str) -> None:
    one, other = DIFFERENT[case]
    assert one() != other()
    assert one() == one()


def test_names_and_the_layout_at_the_edge_are_not_part_of_the_work() -> None:
    assert signature(pair("a", "b"), "sub") == signature(pair("b", "a"), "sub")
    plain, last = (
        extract(nn.Sequential(nn.Conv2d(3, 4, 1)), TensorType((2, 3, 5, 5), layout=layout))
        for layout in ("nchw", "nhwc")
    )
    assert [s.signature for s in one_by_one(plain)] == [s.signature for s in one_by_one(last)]
    assert plain.digest != last.digest


@pytest.mark.parametrize("name", [field.name for field in fields(Step)])
def test_signature_changes_with_every_field(name: str) -> None:
    step = make_step(graph(), ["matmul", "relu", "affine_2"])
    changed = {
        "nodes": step.nodes[:2],
        "inputs": (*step.inputs, ("z", X)),
        "outputs": step.outputs[:1],
        "constants": frozenset(),
        "phase": "backward",
    }[name]
    if name == "nodes":
        step = replace(step, outputs=step.outputs[:1])
    assert replace(step, **{name: changed}).signature != step.signature
