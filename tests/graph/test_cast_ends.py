"""Groups of nodes with casts in front of them, between them and after them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from plantune.graph.builder import GraphBuilder
from plantune.graph.cast_ends import cast_groups, with_ends
from plantune.graph.contraction import contracted
from plantune.graph.fusions import all_fusions, fusions_named, groups_from, parse_fusion
from plantune.graph.graph import Graph
from plantune.graph.ops.cast import INSERTED
from plantune.graph.partition import alternatives, fused
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.step import make_step
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.extract import extract_with_outputs
from plantune.graph.types import TensorType
from plantune.models.se_resnet9 import se_resnet9_fixup

CONV = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
OURS: dict[str, Any] = {INSERTED: True}


def block(*, own: bool = False, kept: bool = False) -> Graph:
    """A convolution of 16 bits, its result in 32 with a residual of 16, and cast again."""
    b = GraphBuilder()
    b.input("x", TensorType((2, 8, 4, 4), "float16"))
    b.input("r", TensorType((2, 8, 4, 4), "float16"))
    b.parameter("w", TensorType((8, 8, 3, 3), "float16"))
    b.parameter("s", TensorType((1,)))
    (y,) = b.emit("conv2d", "x", "w", **CONV)
    (wide,) = b.emit("cast", y, dtype="float32", **OURS)
    (moved,) = b.emit("add", wide, "s")
    (other,) = b.emit("cast", "r", dtype="float32", **OURS)
    (total,) = b.emit("add", moved, other)
    (a,) = b.emit("relu", total)
    (narrow,) = b.emit("cast", a, dtype="float16", **({} if own else OURS))
    (z,) = b.emit("conv2d", narrow, "w", **CONV)
    return b.build((z, a) if kept else (z,))


def groups(graph: Graph, fusion: str, node: str) -> list[tuple[str, ...]]:
    (found,) = fusions_named(fusion)
    return [*groups_from(graph, graph.nodes[graph.positions[node]], found)]


def test_a_path_sees_through_casts() -> None:
    found = groups(block(), "conv_epilogue", "conv2d")
    inner = ("conv2d", "cast", "add", "add_2", "relu")
    assert inner in found  # the residual may be cast elsewhere
    assert ("conv2d", "cast", "add", "cast_2", "add_2", "relu", "cast_3") in found
    assert ("conv2d", "cast") not in found  # what reads the cast takes it
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("own", [False, True])
def test_the_result_may_be_stored_cast(own: bool) -> None:
    graph = block(own=own)
    whole = ("conv2d", "cast", "add", "cast_2", "add_2", "relu", "cast_3")
    assert whole in groups(graph, "conv_epilogue", "conv2d")
    step = contracted(make_step(graph, whole))
    assert step.ops == ("conv2d", "add", "add", "relu")
    assert [(name, type_.dtype) for name, type_ in step.outputs] == [("cast_3", "float16")]
    assert step.types["r"].dtype == "float16"
    assert step.types["s"].dtype == "float32"


def test_both_may_leave() -> None:
    graph = block(kept=True)
    whole = ("conv2d", "cast", "add", "cast_2", "add_2", "relu", "cast_3")
    assert whole in groups(graph, "conv_epilogue", "conv2d")
    step = contracted(make_step(graph, whole))
    assert {name: type_.dtype for name, type_ in step.outputs} == {
        "relu": "float32",
        "cast_3": "float16",
    }


def test_a_path_does_not_see_through_the_users_rounding() -> None:
    pair = parse_fusion("pair", {"path": ["relu", "conv2d"]}, "here")
    for own in (False, True):
        graph = block(own=own)
        found = [*groups_from(graph, graph.nodes[graph.positions["relu"]], pair)]
        assert any("conv2d_2" in group for group in found) != own


def test_any_op_may_take_its_casts() -> None:
    b = GraphBuilder()
    b.input("x", TensorType((4, 8), "float16"))
    (wide,) = b.emit("cast", "x", dtype="float32", **OURS)
    (rows,) = b.emit("mean", wide, dims=(1,), keepdim=False)
    (narrow,) = b.emit("cast", rows, dtype="float16", **OURS)
    graph = b.build((narrow,))
    found = [*cast_groups(graph, graph.nodes[graph.positions[rows]])]
    assert set(found) == {("cast", "mean"), ("mean", "cast_2"), ("cast", "mean", "cast_2")}


def test_a_cast_that_others_read_is_not_taken_in_front() -> None:
    b = GraphBuilder()
    b.input("x", TensorType((4, 8), "float16"))
    (wide,) = b.emit("cast", "x", dtype="float32", **OURS)
    (a,) = b.emit("relu", wide)
    (c,) = b.emit("sigmoid", wide)
    graph = b.build((a, c))
    assert [*with_ends(graph, (a,))] == [(a,)]


def se_resnet9(*, trains: bool) -> Graph:
    module = se_resnet9_fixup(base_planes=16).train(trains)
    arguments = Arguments((TensorType((2, 3, 64, 64)),), autocast=("cuda", torch.float16))
    graph = extract_with_outputs(module, arguments)[0]
    return differentiate(graph) if trains else graph


@pytest.mark.parametrize("trains", [False, True])
def test_a_network_under_autocast_has_the_groups_that_it_has_in_16_bits(trains: bool) -> None:
    graph = se_resnet9(trains=trains)
    ops = {contracted(step).ops for step in alternatives(graph, all_fusions())}
    tail = ("mean", "matmul", "add_channel", "relu", "matmul", "add_channel", "sigmoid")
    assert ("conv2d", "mul", "add") in ops
    assert ("conv2d", "add", "relu", "add") in ops
    assert ("mul", "add", *tail, "reshape", "mul", "add", "relu") in ops
    if trains:
        assert ("conv2d_dgrad", "sum_to", "apart_grad", "sum_to") in ops
        assert ("conv2d_wgrad",) in ops


@pytest.mark.parametrize("trains", [False, True])
def test_any_partition_means_what_the_graph_means(trains: bool, runs: Any) -> None:
    graph = se_resnet9(trains=trains)
    steps = fused(graph, all_fusions())
    assert len(steps) < len(graph.nodes) / 3
    runs(graph, steps)


def test_alternatives_do_not_explode() -> None:
    """A chain of casts and pointwise ops, each of which reads the one before."""
    b = GraphBuilder()
    last = b.input("x", TensorType((4, 8), "float16"))
    for _ in range(20):
        (wide,) = b.emit("cast", last, dtype="float32", **OURS)
        (moved,) = b.emit("relu", wide)
        (last,) = b.emit("cast", moved, dtype="float16", **OURS)
    graph = b.build((last,))
    assert len(alternatives(graph, fusions_named("pointwise_chain"))) < 60 * 24


def test_a_module_of_16_bits_has_the_alternatives_that_it_had() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).half().eval()
    arguments = Arguments((TensorType((2, 3, 8, 8), "float16"),))
    graph = extract_with_outputs(module, arguments)[0]
    assert not graph.casts
    assert [*with_ends(graph, ("conv2d",))] == [("conv2d",)]
