"""A partition covers each op once, in an order that can run, and computes what the graph does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from torch import Tensor

from plantune.errors import InvalidGraph
from plantune.graph import partition as partitioning
from plantune.graph.builder import GraphBuilder
from plantune.graph.fusions import all_fusions, load_fusions
from plantune.graph.graph import Graph, Node
from plantune.graph.partition import (
    alternatives,
    fused,
    one_by_one,
    partition_into,
    why_not_group,
)
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.step import phase_of
from plantune.graph.types import TensorType

Values = dict[str, Tensor]
X = TensorType((2, 3, 6, 6))


def diamond() -> Graph:
    """a -> b -> c, and c reads a too; k is a constant."""
    g = GraphBuilder()
    g.input("x", X)
    g.parameter("w", TensorType((3,)))
    (k,) = g.emit("affine", "w", alpha=2.0, beta=0.0, place="k")
    (a,) = g.emit("relu", "x", place="a")
    (b,) = g.emit("sigmoid", a, place="b")
    (c,) = g.emit("add", a, b, place="c")
    (d,) = g.emit("mul_channel", c, k, place="d", axis=1)
    return g.build((d,))


A, B, C, D, K = "a/relu", "b/sigmoid", "c/add", "d/mul_channel", "k/affine"


def two_chains() -> Graph:
    """p -> q and r -> s: {p, s} and {q, r} are fine alone and wait for each other together."""
    g = GraphBuilder()
    g.input("x", X)
    g.input("y", X)
    (p,) = g.emit("relu", "x", place="p")
    (q,) = g.emit("sigmoid", p, place="q")
    (r,) = g.emit("relu", "y", place="r")
    (s,) = g.emit("sigmoid", r, place="s")
    return g.build((q, s))


CROSSED = (("p/relu", "s/sigmoid"), ("r/relu", "q/sigmoid"))
WAITS = "it would wait for a step that waits for it"


@pytest.mark.parametrize(
    ("group", "others", "reason"),
    [
        ((A, B), (), None),
        ((A, B, C), (), None),
        ((B, C, D), (), None),
        ((A, C), (), WAITS),
        ((A, B, D), (), WAITS),
        ((K, D), (), "its nodes run in several phases: forward, refresh"),
        ((A, f"d({A})/relu_grad"), (), "its nodes run in several phases: backward, forward"),
    ],
)
def test_why_not_group(group: tuple[str, ...], others: Any, reason: str | None) -> None:
    graph = differentiate(diamond(), ["x"])
    assert why_not_group(graph, group, others) == reason
    if reason:
        singles = [(n.name,) for n in graph.nodes if n.name not in group]
        with pytest.raises(InvalidGraph):
            partition_into(graph, [group, *singles])


def test_a_group_alone_waits_for_itself_just_where_no_order_runs_it() -> None:
    graph = differentiate(diamond())
    singles = {node.name for node in graph.nodes}
    reasons = set()
    for group in itertools.combinations(singles, 3):
        if len({phase_of(graph, graph.nodes[graph.positions[name]]) for name in group}) == 1:
            rest = [(name,) for name in singles - {*group}]
            order = partitioning._runnable_order(graph, [group, *rest])
            reasons.add(reason := why_not_group(graph, group))
            assert (reason is None) == (order is not None)
    assert reasons == {None, WAITS}


def test_groups_wait_for_each_other_just_where_no_order_runs_them() -> None:
    graph = two_chains()
    singles = {node.name for node in graph.nodes}
    pairs = [pair for pair in itertools.combinations(singles, 2) if not why_not_group(graph, pair)]
    reasons = set()
    for group, other in itertools.permutations(pairs, 2):
        if set(group).isdisjoint(other):
            rest = [(name,) for name in singles - {*group, *other}]
            order = partitioning._runnable_order(graph, [group, other, *rest])
            reasons.add(reason := why_not_group(graph, group, [other]))
            assert (reason is None) == (order is not None)
    assert reasons == {None, WAITS}


def tangle(random: Random, size: int = 14) -> Graph:
    g = GraphBuilder()
    g.input("x", X)
    values = ["x"]
    for at in range(size):
        reads = [random.choice(values[-5:]) for _ in range(2)]
        values += g.emit("add", *reads, place=f"n{at}")
    return g.build(tuple(values[-5:]))


def test_beside_many_groups_one_waits_just_where_no_order_runs_them() -> None:
    random, reasons = Random(0), set()
    for _ in range(60):
        graph = tangle(random)
        left, taken = [node.name for node in graph.nodes], list[tuple[str, ...]]()
        for _ in range(8):
            group = tuple(random.sample(left, min(len(left), random.choice((2, 2, 3)))))
            rest = [(name,) for name in left if name not in group]
            order = partitioning._runnable_order(graph, [group, *taken, *rest])
            reasons.add(reason := why_not_group(graph, group, taken))
            assert (reason is None) == (order is not None), (group, taken)
            if reason is None:
                taken.append(group)
                left = [name for name in left if name not in group]
    assert reasons == {None, WAITS}


def test_a_long_chain_costs_each_node_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over 128 steps of a recurrent layer has 2,000 nodes."""
    asked = 0
    makers = Graph.makers

    def counting(graph: Graph, node: Node) -> Any:
        nonlocal asked
        asked += 1
        return makers(graph, node)

    monkeypatch.setattr(Graph, "makers", counting)
    found = []
    for size in (40, 160):
        g, asked = GraphBuilder(), 0
        g.input("x", X)
        value = "x"
        for _ in range(size):
            value = g.emit("sigmoid", g.emit("relu", value)[0])[0]
            value = g.emit("mean", value, dims=(2,), keepdim=True)[0]
            value = g.emit("add", "x", value)[0]
        assert len(fused(g.build((value,)), all_fusions())) < 4 * size
        found.append(asked)
    assert found[1] < 5 * found[0]


def test_groups_that_wait_for_each_other() -> None:
    graph = two_chains()
    assert why_not_group(graph, CROSSED[0]) is None
    assert why_not_group(graph, CROSSED[1]) is None
    assert why_not_group(graph, CROSSED[1], [CROSSED[0]]) == WAITS
    with pytest.raises(InvalidGraph, match="these steps wait for each other"):
        partition_into(graph, CROSSED)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([(A, B), (C, D), (K,), (B,)], rf"nodes covered twice: \['{B}'\]; not covered: \[\]"),
        ([(A, B), (C, D)], rf"not covered: \['{K}'\]"),
        ([(A,), (B,), (C,), (D,), (K,), ("no",)], r"no step can cover \['no'\]"),
        ([(A, B), (C, D), (K,), ()], "no step can cover nothing"),
        ([(A,), (B,), (C,), (D, K)], "belong to several phases"),
    ],
)
def test_partition_into_refuses(groups: Any, message: str) -> None:
    with pytest.raises(InvalidGraph, match=message):
        partition_into(diamond(), groups)


def test_the_order_of_the_groups_changes_nothing() -> None:
    groups = [(A, B, C), (D,), (K,)]
    first = partition_into(diamond(), groups)
    assert [step.name for step in first] == [K, A, D]
    assert partition_into(diamond(), groups[::-1]) == first


def test_fused_takes_the_largest_group_that_is_admitted(tmp_path: Any) -> None:
    path = tmp_path / "f.toml"
    path.write_text("[f]\npath = ['relu', 'sigmoid', 'add', 'mul_channel']")
    fusions = load_fusions(path)

    def sizes(steps: Sequence[Any]) -> list[int]:
        return [len(step.nodes) for step in steps]

    assert sizes(fused(diamond(), fusions)) == [1, 4]
    assert sizes(fused(diamond(), fusions, lambda step: len(step.nodes) < 4)) == [1, 3, 1]
    assert sizes(fused(diamond(), fusions, lambda step: "add" not in step.ops)) == [1, 2, 1, 1]
    assert sizes(fused(diamond(), fusions, lambda step: False)) == [1] * 5
    assert sizes(fused(diamond(), ())) == [1] * 5


def test_fused_looks_at_a_group_beside_those_already_taken(tmp_path: Any, runs: Any) -> None:
    g = GraphBuilder()
    g.input("x", X)
    g.input("y", X)
    (p,) = g.emit("relu", "x", place="p")
    (q,) = g.emit("relu", "y", place="q")
    graph = g.build((*g.emit("add", p, q), *g.emit("mul", q, p)))
    (tmp_path / "f.toml").write_text("[a]\npath = ['relu', 'add']\n[m]\npath = ['relu', 'mul']")
    fusions = load_fusions(tmp_path / "f.toml")
    assert len(alternatives(graph, fusions)) == 8
    # {p, add} waits for q and {q, mul} waits for p: the second cannot be taken.
    steps = fused(graph, fusions)
    assert sorted(step.ops for step in steps) == [("mul",), ("relu",), ("relu", "add")]
    runs(graph, steps)


# Two rules of which each offers a group that cannot run in one of the graphs.
WRONG = "[skip]\npath = ['relu', 'add']\n[cross]\npath = ['affine', 'mul_channel']"


def test_fused_and_alternatives_leave_out_what_cannot_run(tmp_path: Any, runs: Any) -> None:
    (tmp_path / "f.toml").write_text(WRONG)
    fusions = load_fusions(tmp_path / "f.toml")
    assert len(alternatives(diamond(), fusions)) == 5
    runs(diamond(), fused(diamond(), fusions))


@pytest.mark.parametrize("rule", ["skip", "cross"])
def test_without_the_check_of_a_group_a_wrong_partition_is_noticed(
    rule: str, tmp_path: Any, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f.toml").write_text(WRONG)
    fusions = [f for f in load_fusions(tmp_path / "f.toml") if f.name == rule]
    monkeypatch.setattr(partitioning, "why_not_group", lambda *_: None)
    with pytest.raises(InvalidGraph, match=r"wait for each other|several phases"):
        fused(diamond(), fusions)
    # And without the last guards too, the steps themselves do not run.
    monkeypatch.setattr(partitioning, "_runnable_order", lambda _, groups: range(len(groups)))
    monkeypatch.setattr("plantune.graph.step.phase_of", lambda *_: "refresh")
    monkeypatch.setattr(partitioning, "phase_of", lambda *_: "refresh")
    with pytest.raises((AssertionError, KeyError)):
        runs(diamond(), fused(diamond(), fusions))


def test_a_wrong_order_of_right_steps_is_noticed(
    runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backwards = lambda _, groups: range(len(groups))[::-1]  # noqa: E731
    monkeypatch.setattr(partitioning, "_runnable_order", backwards)
    with pytest.raises((AssertionError, KeyError)):
        runs(diamond(), one_by_one(diamond()))


def test_a_value_that_does_not_leave_its_step_is_noticed(runs: Any) -> None:
    steps = partition_into(diamond(), [(A,), (B, C), (D,), (K,)])
    broken = tuple(replace(step, outputs=()) if step.name == B else step for step in steps)
    runs(diamond(), steps)
    with pytest.raises(KeyError):
        runs(diamond(), broken)
