"""Any legal partition of any graph computes what the graph does, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plantune.graph.builder import GraphBuilder
from plantune.graph.fusions import all_fusions
from plantune.graph.graph import Graph
from plantune.graph.partition import (
    alternatives,
    fused,
    one_by_one,
    partition_into,
    why_not_group,
)
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.models.resnet import resnet18
from plantune.models.se_resnet9 import se_resnet9_fixup

X = TensorType((2, 3, 6, 6))


def se() -> Graph:
    network = se_resnet9_fixup(3, base_planes=32)
    return differentiate(extract(network, TensorType((1, 3, 64, 64))))


def resnet(training: bool) -> Graph:
    network = resnet18(num_classes=3).train(training)
    graph = extract(network, TensorType((2, 3, 33, 33)))
    return differentiate(graph) if training else graph


NETWORKS = {"se": se, "resnet train": lambda: resnet(True), "resnet eval": lambda: resnet(False)}


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_one_by_one_and_fused(network: str, runs: Any) -> None:
    graph = NETWORKS[network]()
    singles, steps = one_by_one(graph), fused(graph, all_fusions())
    assert len(singles) == len(graph.nodes) > 1.3 * len(steps)
    runs(graph, singles)
    runs(graph, steps)


def random_graph(draw: Any) -> Graph:
    """Ten ops on images, each on values made before, with their backward pass."""
    b = GraphBuilder()
    values = [b.input("x", X)]
    images = {"stride": (1, 1), "padding": (1, 1)}
    for i in range(10):
        pick = st.sampled_from(values[-4:])
        x, kind = (
            draw(pick),
            draw(st.sampled_from(["conv", "act", "two", "channel", "gate", "pool"])),
        )
        if kind == "conv":
            w = b.parameter(f"w{i}", TensorType((3, 3, 3, 3)))
            (y,) = b.emit("conv2d", x, w, **images, dilation=(1, 1), groups=1)
        elif kind == "act":
            (y,) = b.emit(draw(st.sampled_from(["relu", "sigmoid"])), x)
        elif kind == "two":
            (y,) = b.emit(draw(st.sampled_from(["add", "mul", "sub"])), x, draw(pick))
        elif kind == "channel":
            s = b.parameter(f"s{i}", TensorType((3,)))
            (s,) = b.emit("affine", s, alpha=0.5, beta=1.0) if draw(st.booleans()) else (s,)
            (y,) = b.emit(draw(st.sampled_from(["add_channel", "mul_channel"])), x, s, axis=1)
        elif kind == "gate":
            (m,) = b.emit("mean", x, dims=(2, 3), keepdim=True)
            (y,) = b.emit("mul", x, b.emit("sigmoid", m)[0])
        else:
            (y,) = b.emit("avg_pool2d", x, kernel=(3, 3), **images, count_padding=True)
        values.append(y)
    return differentiate(
        b.build((values[-1], *draw(st.sets(st.sampled_from(values[1:]), max_size=1))))
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_legal_partition_of_any_graph(runs: Any, data: st.DataObject) -> None:
    graph = random_graph(data.draw)
    offers = [tuple(n.name for n in s.nodes) for s in alternatives(graph, all_fusions())]
    taken: list[tuple[str, ...]] = []
    for offer in data.draw(st.permutations([o for o in offers if len(o) > 1])):
        free = not {name for group in taken for name in group} & set(offer)
        if free and why_not_group(graph, offer, taken) is None:
            taken.append(offer)
    rest = {node.name for node in graph.nodes} - {name for group in taken for name in group}
    runs(graph, partition_into(graph, [*taken, *((n,) for n in rest)]))
