"""The language of fusions.toml, and what the shipped fusions find."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plantune.errors import InvalidSearchSpace
from plantune.graph import fusions
from plantune.graph.builder import GraphBuilder
from plantune.graph.fusions import Fusion, Item, all_fusions, fusions_named, groups_from, kinds_of
from plantune.graph.graph import Graph
from plantune.graph.partition import alternatives, why_not_group
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.models.resnet import resnet18
from plantune.models.se_resnet9 import se_resnet9_fixup

X = TensorType((2, 4, 6, 6))


def load(folder: Path, text: str) -> tuple[Fusion, ...]:
    path = folder / "fusions.toml"
    path.write_text(text, encoding="utf-8")
    return fusions.load_fusions(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a", "fusions.toml: cannot be read"),
        ("a = 1", r"\[a\]: needs one `path` of two or more strings"),
        ("[a]", r"\[a\]: needs one `path`"),
        ("[a]\npath = 'relu'", r"\[a\]: needs one `path`"),
        ("[a]\npath = ['relu']", r"\[a\]: needs one `path` of two or more strings"),
        ("[a]\npath = ['relu', 3]", r"\[a\]: needs one `path`"),
        ("[a]\npath = ['relu', 'add']\nextra = 1", r"\[a\]: needs one `path`"),
        ("[a]\npath = ['relu', 'add']\njoining = 'mul'", r"\[a\]: needs one `path`"),
        ("[a]\npath = ['relu', 'add']\njoining = ['swish']", r"\[a\]: 'swish' names no op"),
        ("[a]\npath = ['relu?', 'add*']", r"\[a\]: an item of a path must be there"),
        ("[a]\npath = ['relu?', '+add']", r"\[a\]: an item of a path must be there"),
        ("[a]\npath = ['+relu', 'add']", r"\[a\]: the first item of a path cannot branch off"),
        ("[a]\npath = ['relu', '+add>swish']", r"\[a\]: 'swish' names no op"),
        ("[a]\npath = ['relu', 'sum_to.tensor']", "sum_to has no operand 'tensor'"),
        ("[a]\npath = ['relu', 'swish']", r"\[a\]: 'swish' names no op; see plantune.graph.ops"),
        ("[a]\npath = ['relu', 'add|']", r"\[a\]: '' names no op"),
        ("[a]\npath = ['relu', '']", r"\[a\]: '' names no op"),
        ("[a]\npath = ['relu', 'add??']", r"\[a\]: 'add\?' names no op"),
        ("[a]\npath = ['relu', 'add.vector']", r"'add.vector': add has no operand 'vector'"),
        ("[a]\npath = ['relu', 'sigmoid.scalar']", "sigmoid has no operand 'scalar'"),
        ("[a]\npath = ['relu', 'pointwise.scalar']", "'pointwise.scalar' names no op"),
    ],
)
def test_a_fault_in_the_file_is_named_with_its_place(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSearchSpace, match=message):
        load(tmp_path, text)


def test_a_missing_file_and_bytes_that_are_not_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidSearchSpace, match="cannot be read"):
        fusions.load_fusions(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidSearchSpace, match="cannot be read"):
        fusions.load_fusions(tmp_path / "bytes.toml")


def test_fusions_by_name() -> None:
    first, second = fusions_named("pool_conv", "linear")
    assert (first.name, second.name) == ("pool_conv", "linear")
    with pytest.raises(InvalidSearchSpace, match=r"no fusion is called \['no'\]; known: conv_epi"):
        fusions_named("linear", "no")


def chain(*ops: str) -> Graph:
    """x through ops of one operand, or of two where the second is told after a dot."""
    b = GraphBuilder()
    seconds = {"scalar": (1,), "tensor": X.shape, "broadcast": (2, 4, 1, 1)}
    value = b.input("x", X)
    for name, shape in seconds.items():
        b.parameter(name, TensorType(shape))
    for word in ops:
        op, _, second = word.partition(".")
        value = b.emit(op, value, *([second] if second else []))[0]
    return b.build((value,))


def found(graph: Graph, text: list[str], folder: Path) -> list[str]:
    """The groups of a path from the first node on, as the last node of each."""
    (fusion,) = load(folder, f"[f]\npath = {text}")
    groups = list(groups_from(graph, graph.nodes[0], fusion))
    names = [node.name for node in graph.nodes]
    for group in groups:
        assert len(set(group)) == len(group) > 1
        assert list(group) == sorted(group, key=names.index)
    return [" ".join(group) for group in groups]


RSR = ["relu", "sigmoid", "relu"]
PATHS: list[tuple[list[str], list[str], list[str]]] = [
    (["relu", "sigmoid"], ["relu", "sigmoid"], ["relu sigmoid"]),
    (["relu", "sigmoid"], ["sigmoid", "relu"], []),
    (["relu", "sigmoid"], ["relu", "relu"], []),
    (RSR, ["relu", "sigmoid"], ["relu sigmoid"]),
    (RSR, ["relu", "sigmoid", "relu"], ["relu sigmoid", "relu sigmoid relu_2"]),
    (["relu", "relu"], ["relu", "sigmoid?", "relu"], ["relu relu_2"]),
    (RSR, ["relu", "sigmoid?", "relu"], ["relu sigmoid", "relu sigmoid relu_2"]),
    (["relu", "sigmoid"], ["relu", "add?", "mul?", "sigmoid"], ["relu sigmoid"]),
    (["relu", "relu", "relu"], ["relu", "relu*"], ["relu relu_2", "relu relu_2 relu_3"]),
    (["relu", "sigmoid"], ["relu", "relu*", "sigmoid"], ["relu sigmoid"]),
    (["relu", "sigmoid"], ["relu", "add|sigmoid"], ["relu sigmoid"]),
    (["relu", "add.scalar"], ["relu", "pointwise"], ["relu add"]),
    (RSR, ["sigmoid?", "relu?", "sigmoid"], ["relu sigmoid"]),
    (RSR, ["relu?", "relu?", "sigmoid", "relu"], ["relu sigmoid", "relu sigmoid relu_2"]),
    (["relu", "sigmoid"], ["sigmoid?", "sigmoid"], []),
    *[
        (["relu", f"{op}.{have}"], ["relu", f"{op}.{want}"], [f"relu {op}"] if have == want else [])
        for op in ("add", "mul")
        for have in ("scalar", "tensor", "broadcast")
        for want in ("scalar", "tensor", "broadcast")
    ],
]  # fmt: skip


@pytest.mark.parametrize(("ops", "path", "expected"), PATHS)
def test_paths(ops: list[str], path: list[str], expected: list[str], tmp_path: Path) -> None:
    assert found(chain(*ops), path, tmp_path) == expected


def test_a_path_follows_each_reader_and_each_operand(tmp_path: Path) -> None:
    b = GraphBuilder()
    b.input("x", X)
    (r,) = b.emit("relu", "x")
    (s,) = b.emit("sigmoid", r)
    (a,) = b.emit("add", "x", r)
    graph = b.build(b.emit("mul", s, a))
    groups = found(graph, ["relu", "sigmoid|add", "mul"], tmp_path)
    assert groups == ["relu sigmoid", "relu sigmoid mul", "relu add", "relu add mul"]


def tail() -> Graph:
    """r is read by a sum, by a product of which there is a sum, and by another product; what that
    is multiplied with follows from a parameter.
    """
    b = GraphBuilder()
    b.input("x", X)
    b.parameter("k", TensorType((2, 4, 1, 1)))
    (k,) = b.emit("affine", "k", alpha=2.0, beta=0.0)
    (w,) = b.emit("mul", "x", k)
    (r,) = b.emit("relu", w)
    (one,) = b.emit("sum_to", r, shape=(1,))
    (m,) = b.emit("mul", r, "x")
    (two,) = b.emit("sum_to", m, shape=(1,))
    (s,) = b.emit("sigmoid", r)
    (p,) = b.emit("mul", s, w)
    return b.build((one, two, p))


@pytest.mark.parametrize(
    ("path", "groups"),
    [
        (["relu", "+sum_to"], ["relu sum_to"]),
        (["relu", "+sum_to", "sigmoid"], ["relu sum_to", "relu sum_to sigmoid"]),
        (
            ["relu", "+mul>sum_to", "sigmoid"],
            ["relu mul_2 sum_to_2", "relu mul_2 sum_to_2 sigmoid"],
        ),
        (["relu", "+mul>sum_to>relu", "sigmoid"], ["relu sigmoid"]),
        (["relu", "+mean", "sigmoid", "+sum"], ["relu sigmoid"]),
        (["relu", "sigmoid", "+sum_to|mul"], ["relu sigmoid mul_3"]),
        (["relu", "+sum_to.scalar"], ["relu sum_to"]),
    ],
)
def test_what_else_reads_a_value_is_taken_along_where_it_is(
    path: list[str], groups: list[str], tmp_path: Path
) -> None:
    graph = tail()
    (fusion,) = load(tmp_path, f"[f]\npath = {path}")
    start = graph.nodes[graph.positions["relu"]]
    assert [" ".join(group) for group in groups_from(graph, start, fusion)] == groups


@pytest.mark.parametrize(
    ("path", "joining", "groups"),
    [
        (["relu", "sigmoid"], ["mul"], ["relu sigmoid"]),
        (["relu", "sigmoid", "mul"], ["mul"], ["relu sigmoid", "mul relu sigmoid mul_3"]),
        (["relu", "sigmoid", "mul"], ["sum_to"], ["relu sigmoid", "relu sigmoid mul_3"]),
        (["relu", "sigmoid", "mul"], ["mul|affine"], ["relu sigmoid", "mul relu sigmoid mul_3"]),
    ],
)
def test_what_a_group_alone_reads_joins_it(
    path: list[str], joining: list[str], groups: list[str], tmp_path: Path
) -> None:
    graph = tail()
    (fusion,) = load(tmp_path, f"[f]\npath = {path}\njoining = {joining}")
    start = graph.nodes[graph.positions["relu"]]
    assert [" ".join(group) for group in groups_from(graph, start, fusion)] == groups


def test_what_joins_is_of_the_same_pass(tmp_path: Path) -> None:
    graph = differentiate(chain("sigmoid", "mul.tensor"), ["tensor"])
    text = "[f]\npath = ['mul', 'sum_to?', 'relu*']\njoining = ['pointwise']"
    (fusion,) = load(tmp_path, text)
    for node in graph.nodes:
        for group in groups_from(graph, node, fusion):
            assert len({name in graph.backward_nodes for name in group}) == 1


def test_repeating_items_end(tmp_path: Path) -> None:
    long = chain(*["relu"] * 40)
    groups = found(long, ["relu", "pointwise*"], tmp_path)
    assert len(groups) == fusions.LONGEST - 1


def test_a_path_stays_in_its_pass(tmp_path: Path) -> None:
    graph = differentiate(chain("relu", "sigmoid"), ["scalar", "x"])
    assert found(graph, ["relu", "sigmoid|sigmoid_grad|relu_grad*"], tmp_path) == ["relu sigmoid"]


class Joined(nn.Module):
    def forward(self, x):
        return torch.relu(torch.cat((x, x.sigmoid()), 1))


class Rows(nn.Module):
    def forward(self, x):
        return (x.flatten(2).transpose(1, 2) * 0.5).softmax(-1)


class Heads(nn.Module):
    def forward(self, x):
        y = (x @ x.transpose(-2, -1)).softmax(-1) @ x
        return y.view(2, 3, 8, 8, 8, 8).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 64, 64) + x


@cache
def networks() -> dict[str, Graph]:
    size = TensorType((2, 3, 64, 64))
    return {
        "se_resnet9": differentiate(extract(se_resnet9_fixup(3, base_planes=32), size)),
        "resnet18 eval": extract(resnet18(num_classes=5).eval(), size),
        "resnet18 train": differentiate(extract(resnet18(num_classes=5), size)),
        "joined": extract(Joined(), size),
        "rows of pixels": extract(Rows(), size),
        "heads": extract(Heads(), size),
        "group norm": extract(nn.Sequential(nn.GroupNorm(1, 3), nn.ReLU()), size),
    }


def groups_of(graph: Graph, fusion: Fusion) -> list[tuple[str, ...]]:
    return [group for node in graph.nodes for group in groups_from(graph, node, fusion)]


@pytest.mark.parametrize("fusion", all_fusions(), ids=lambda fusion: fusion.name)
def test_each_shipped_fusion_matches_in_a_shipped_network(fusion: Fusion) -> None:
    items = [item for item in fusion.path if isinstance(item, Item)]
    needed = sum(not item.optional for item in items)
    lengths = [len(g) for graph in networks().values() for g in groups_of(graph, fusion)]
    assert max(lengths, default=0) >= max(needed, 2)


@pytest.mark.parametrize("network", ["se_resnet9", "resnet18 eval", "resnet18 train"])
def test_alternatives_are_each_op_and_each_beginning_that_can_run(network: str) -> None:
    graph = networks()[network]
    offered = {frozenset(n.name for n in step.nodes) for step in alternatives(graph, all_fusions())}
    expected = {frozenset((node.name,)) for node in graph.nodes}
    for fusion in all_fusions():
        groups = groups_of(graph, fusion)
        if not fusion.joining and all(isinstance(item, Item) for item in fusion.path):
            beginnings = {group[:end] for group in groups for end in range(2, len(group))}
            assert beginnings <= set(groups)
        expected |= {frozenset(group) for group in groups if why_not_group(graph, group) is None}
    assert offered == expected
    assert len(alternatives(graph, all_fusions())) == len(offered)


@pytest.mark.parametrize(
    ("second", "kinds"),
    [
        ((1,), {"mul", "pointwise", "mul.scalar"}),
        ((), {"mul", "pointwise", "mul.scalar"}),
        (X.shape, {"mul", "pointwise", "mul.tensor"}),
        ((4, 1, 1), {"mul", "pointwise", "mul.broadcast"}),
    ],
)
def test_kinds_of_a_node(second: Any, kinds: set[str]) -> None:
    b = GraphBuilder()
    b.input("x", X)
    b.parameter("y", TensorType(second))
    graph = b.build(b.emit("mul", "x", "y"))
    assert kinds_of(graph, graph.nodes[0]) == kinds


@pytest.mark.parametrize("fusion", fusions.all_fusions(), ids=lambda fusion: fusion.name)
def test_no_path_is_cut_short(fusion):
    """A whole residual block has 21 ops."""
    assert len(fusion.path) <= fusions.LONGEST
