"""Rewrites keep what a graph computes, and do what they are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.passes.rewrite import (
    fold_scales,
    round_constants_once,
    without_dead_nodes,
    without_spreads,
)
from plantune.graph.types import TensorType

GEOMETRY = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}


def base() -> tuple[GraphBuilder, str]:
    """A builder with one convolution and sources for its scale."""
    b = GraphBuilder()
    b.input("x", TensorType((2, 3, 5, 5)))
    b.input("moving", TensorType((4,)))
    b.parameter("w", TensorType((4, 3, 3, 3)))
    b.parameter("scale", TensorType((4,)))
    b.parameter("rows", TensorType((5,)))
    b.buffer("var", TensorType((4,)))
    return b, b.emit("conv2d", "x", "w", **GEOMETRY)[0]


def scaled_by_a_parameter() -> Graph:
    b, y = base()
    return b.build(b.emit("mul_channel", y, "scale", axis=1))


def scaled_by_what_follows_from_weights() -> Graph:
    b, y = base()
    (s,) = b.emit("mul", "scale", b.emit("sigmoid", "var")[0])
    return b.build(b.emit("relu", b.emit("mul_channel", y, s, axis=1)[0]))


def scaled_twice() -> Graph:
    b, y = base()
    (y,) = b.emit("mul_channel", y, "scale", axis=1)
    return b.build(b.emit("mul_channel", y, "var", axis=1))


def one_weight_under_two_scales() -> Graph:
    b, y = base()
    (other,) = b.emit("conv2d", "x", "w", **GEOMETRY)
    (y,) = b.emit("mul_channel", y, "scale", axis=1)
    (other,) = b.emit("mul_channel", other, "var", axis=1)
    return b.build(b.emit("add", y, other))


def grouped() -> Graph:
    b = GraphBuilder()
    b.input("x", TensorType((1, 4, 5, 5)))
    b.parameter("w", TensorType((6, 2, 3, 3)))
    b.parameter("scale", TensorType((6,)))
    (y,) = b.emit("conv2d", "x", "w", **{**GEOMETRY, "groups": 2})
    return b.build(b.emit("mul_channel", y, "scale", axis=1))


def scaled_into_a_buffer() -> Graph:
    b, y = base()
    b.buffer("last", TensorType((2, 4, 5, 5)))
    (y,) = b.emit("mul_channel", y, "scale", axis=1)
    b.updates = [("last", y)]
    return b.build(b.emit("relu", y))


def scaled_after_a_bias() -> Graph:
    b, y = base()
    b.parameter("bias", TensorType((4,)))
    (y,) = b.emit("add_channel", y, "bias", axis=1)
    return b.build(b.emit("relu", b.emit("mul_channel", y, "scale", axis=1)[0]))


FOLDED = [
    (scaled_after_a_bias, 1),
    (scaled_by_a_parameter, 1),
    (scaled_by_what_follows_from_weights, 1),
    (scaled_twice, 1),
    (one_weight_under_two_scales, 2),
    (grouped, 1),
    (scaled_into_a_buffer, 1),
]


def read_twice() -> Graph:
    b, y = base()
    (scaled,) = b.emit("mul_channel", y, "scale", axis=1)
    return b.build(b.emit("add", scaled, y))


def unscaled_is_a_result() -> Graph:
    b, y = base()
    (scaled,) = b.emit("mul_channel", y, "scale", axis=1)
    return b.build((scaled, y))


def along_another_axis() -> Graph:
    b, y = base()
    return b.build(b.emit("mul_channel", y, "rows", axis=2))


def by_a_scale_that_comes_with_the_call() -> Graph:
    b, y = base()
    return b.build(b.emit("mul_channel", y, "moving", axis=1))


def of_a_weight_that_comes_with_the_call() -> Graph:
    b, _ = base()
    (w,) = b.emit("mul_channel", "w", "moving", axis=0)
    (y,) = b.emit("conv2d", "x", w, place="late", **GEOMETRY)
    (y,) = b.emit("mul_channel", y, "scale", place="late", axis=1)
    return without_dead_nodes(b.build((y,)))


def by_a_buffer_that_the_graph_moves() -> Graph:
    b, y = base()
    b.updates = [("var", b.emit("affine", "var", alpha=0.5, beta=0.0)[0])]
    return b.build(b.emit("mul_channel", y, "var", axis=1))


def after_something_else() -> Graph:
    b, y = base()
    return b.build(b.emit("mul_channel", b.emit("relu", y)[0], "scale", axis=1))


KEPT = [
    read_twice,
    unscaled_is_a_result,
    along_another_axis,
    by_a_scale_that_comes_with_the_call,
    of_a_weight_that_comes_with_the_call,
    by_a_buffer_that_the_graph_moves,
    after_something_else,
]


def same_meaning(before: Graph, after: Graph, evaluate: Any, draw: Any) -> None:
    values = draw(before)
    known, again = evaluate(before, values), evaluate(after, values)
    for old, new in zip(before.outputs, after.outputs, strict=True):
        torch.testing.assert_close(again[new], known[old], rtol=1e-12, atol=1e-12)
    for (buffer, old), (same, new) in zip(before.updates, after.updates, strict=True):
        assert buffer == same
        torch.testing.assert_close(again[new], known[old])


@pytest.mark.parametrize(("build", "count"), FOLDED)
def test_folds(build: Callable[[], Graph], count: int, evaluate: Any, draw: Any) -> None:
    before = build()
    after = fold_scales(before)
    same_meaning(before, after, evaluate, draw)
    calls = [node for node in after.nodes if node.name not in after.constants]
    scales = [n for n in before.nodes if n.op == "mul_channel" and n.name not in before.constants]
    assert len([n for n in calls if n.op == "mul_channel"]) == len(scales) - count
    assert len(calls) == len([n for n in before.nodes if n.name not in before.constants]) - count


@pytest.mark.parametrize("build", KEPT)
def test_keeps(build: Callable[[], Graph], evaluate: Any, draw: Any) -> None:
    before = build()
    after = fold_scales(before)
    same_meaning(before, after, evaluate, draw)
    assert set(after.nodes) == set(before.nodes)


@pytest.mark.parametrize(
    ("op", "place", "spreads"),
    [
        *[(op, 1, 0) for op in ("add", "mul", "sub", "div")],
        *[(op, 0, 0) for op in ("add", "mul")],
        *[(op, 0, 1) for op in ("sub", "div")],
        ("relu_grad", 1, 1),
    ],
)
def test_arithmetic_repeats_an_operand_itself(
    op: str, place: int, spreads: int, evaluate: Any, draw: Any
) -> None:
    b = GraphBuilder()
    b.input("x", TensorType((2, 3, 4, 4)))
    b.input("gates", TensorType((2, 3, 1, 1)))
    operands = ["x"]
    operands.insert(place, b.emit("broadcast_to", "gates", shape=(2, 3, 4, 4))[0])
    before = b.build(b.emit(op, *operands))
    after = without_dead_nodes(without_spreads(before))
    same_meaning(before, after, evaluate, draw)
    assert [node.op for node in after.nodes].count("broadcast_to") == spreads


def test_of_two_repeated_operands_one_stays_whole(evaluate: Any, draw: Any) -> None:
    b = GraphBuilder()
    b.input("rows", TensorType((2, 1)))
    b.input("columns", TensorType((3,)))
    spread = [b.emit("broadcast_to", name, shape=(2, 3))[0] for name in ("rows", "columns")]
    before = b.build(b.emit("mul", *spread))
    after = without_dead_nodes(without_spreads(before))
    same_meaning(before, after, evaluate, draw)
    assert [node.op for node in after.nodes] == ["broadcast_to", "mul"]


def test_dead_nodes_and_what_they_alone_read_are_removed(evaluate: Any, draw: Any) -> None:
    b, y = base()
    b.emit("mul_channel", y, "scale", axis=1)
    dead = b.emit("relu", y)[0]
    b.emit("sigmoid", dead)
    (moved,) = b.emit("affine", "var", alpha=0.5, beta=1.0)
    b.updates = [("var", moved)]
    before = b.build((y,))
    after = without_dead_nodes(before)
    assert [node.name for node in after.nodes] == ["conv2d", "affine"]
    assert [name for name, _ in after.parameters] == ["w"]
    assert [name for name, _ in after.buffers] == ["var"]
    assert after.inputs == before.inputs  # a caller passes them all the same
    same_meaning(before, after, evaluate, draw)
    assert without_dead_nodes(after) == after


def test_a_buffer_that_is_only_written_stays() -> None:
    b, y = base()
    b.buffer("count", TensorType((4,)))
    b.updates = [("count", "var")]
    assert [name for name, _ in without_dead_nodes(b.build((y,))).buffers] == ["var", "count"]


def test_dead_nodes_before_a_backward_pass_do_not_move_its_beginning(
    evaluate: Any, draw: Any
) -> None:
    b, y = base()
    b.emit("relu", y)
    before = differentiate(b.build((y,)), ["w"])
    after = without_dead_nodes(before)
    assert after.backward_nodes == before.backward_nodes
    assert after.saved == before.saved
    assert [node.op for node in after.nodes] == ["conv2d", "conv2d_wgrad"]
    same_meaning(before, after, evaluate, draw)


@pytest.fixture
def norm() -> Graph:
    """A folded batch norm in half precision: a chain of constants before the convolution."""
    b = GraphBuilder()
    b.input("x", TensorType((2, 3, 5, 5), "float16"))
    b.parameter("w", TensorType((4, 3, 3, 3), "float16"))
    b.parameter("gain", TensorType((4,), "float16"))
    b.buffer("var", TensorType((4,), "float16"))
    (scale,) = b.emit("mul", "gain", b.emit("rsqrt", "var", eps=1e-5)[0])
    (weight,) = b.emit("mul_channel", "w", scale, axis=0)
    return b.build(b.emit("conv2d", "x", weight, **GEOMETRY))


def test_constants_of_16_bits_are_rounded_once(norm: Graph) -> None:
    after = without_dead_nodes(round_constants_once(norm))
    w, gain, var = (torch.randn(4, 3, 3, 3).half(), torch.rand(4).half(), torch.rand(4).half())
    values = {"x": torch.randn(2, 3, 5, 5).half(), "w": w, "gain": gain, "var": var}
    for node in after.nodes[:-1]:
        values.update(
            zip(node.outputs, node.evaluate([values[n] for n in node.inputs]), strict=True)
        )
    scale = gain.float() * (var.float() + 1e-5).rsqrt()
    wanted = (w.float() * scale[:, None, None, None]).half()
    assert torch.equal(values[after.nodes[-1].inputs[1]], wanted)
    assert after.types[after.outputs[0]] == norm.types[norm.outputs[0]]


def test_constants_that_are_wide_stay_as_they_are() -> None:
    wide = scaled_by_what_follows_from_weights()
    assert round_constants_once(wide) is wide
