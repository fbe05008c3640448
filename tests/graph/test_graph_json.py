"""Data that is not a layer graph is refused with InvalidGraph, whatever it holds."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plantune.base.canonical import canonical
from plantune.errors import InvalidGraph
from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.types import TensorType


def valid() -> dict[str, Any]:
    """One graph with ops of every kind and a backward pass."""
    b = GraphBuilder()
    b.input("x", TensorType((2, 3, 8, 8), layout="nhwc"))
    b.parameter("w", TensorType((4, 12, 3, 3)))
    b.parameter("v", TensorType((4, 5)))
    affine = ("scale", "shift", "mean", "var")
    for name in affine:
        (b.parameter if name[0] == "s" else b.buffer)(name, TensorType((4,)))
    b.buffer("count", TensorType((), "int64"))
    geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    window = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1)}
    (y,) = b.emit("space_to_depth", "x", block=2)
    (y,) = b.emit("conv2d", y, "w", **geometry)
    y, _, _, *moved = b.emit("batch_norm", y, *affine, eps=1e-5, momentum=0.1)
    (y,) = b.emit("avg_pool2d", b.emit("max_pool2d", y, **window)[0], **window, count_padding=False)
    (y,) = b.emit("mean", b.emit("sigmoid", b.emit("relu", y)[0])[0], dims=(2, 3), keepdim=True)
    (y,) = b.emit(
        "matmul", b.emit("reshape", y, shape=(2, 4))[0], "v", transpose_a=False, transpose_b=False
    )
    (y,) = b.emit("affine", b.emit("permute", y, dims=(1, 0))[0], alpha=2.0, beta=0.5)
    (count,) = b.emit("affine", "count", alpha=1, beta=1)
    b.updates = [("mean", moved[0]), ("var", moved[1]), ("count", count)]
    graph = differentiate(b.build((y,)), ["x", "w", "v", "scale"])
    return json.loads(canonical(graph.to_json()))


VALID = valid()
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)


JSON = st.recursive(SCALARS, nested, max_leaves=4)
NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 10**400, -(10**9), 0.0, -0.5, 1e308, True, None])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside."""
    if not isinstance(value, (dict, list)):
        return [path]
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    return [path, *(found for key, item in inside for found in places(item, (*path, key)))]


PLACES = places(VALID)[1:]


def judge(data: Any) -> None:
    """It is no graph, or exactly the graph that it says."""
    try:
        graph = Graph.from_json(data)
    except InvalidGraph:
        return
    assert canonical(graph.to_json()) == canonical(data)
    assert len(graph.digest) == 64


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(PLACES), st.sampled_from(["put", "remove", "repeat"]), JSON | NUMBERS)
def test_one_changed_place(place: tuple[Any, ...], action: str, value: Any) -> None:
    data = copy.deepcopy(VALID)
    owner = data
    for key in place[:-1]:
        owner = owner[key]
    if action == "put":
        owner[place[-1]] = value
    elif action == "repeat" and isinstance(owner, list):
        owner.insert(place[-1], owner[place[-1]])
    else:
        del owner[place[-1]]
    judge(data)


@given(JSON)
def test_any_json(value: Any) -> None:
    with pytest.raises(InvalidGraph):
        Graph.from_json(value)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PLACES), st.sampled_from(PLACES))
def test_two_exchanged_places(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    data = copy.deepcopy(VALID)
    if one[: len(other)] == other or other[: len(one)] == one:
        return
    owners = []
    for place in (one, other):
        owner: Any = data
        for key in place[:-1]:
            owner = owner[key]
        owners.append(owner)
    first, second = owners[0][one[-1]], owners[1][other[-1]]
    owners[0][one[-1]], owners[1][other[-1]] = second, first
    judge(data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("outputs", VALID["outputs"][0]),  # a string is no list of names
        ("updates", {"mean": "batch_norm:3"}),
        ("backward_from", float(VALID["backward_from"])),
        ("backward_from", str(VALID["backward_from"])),
        ("comment", "a key that no graph has"),
    ],
)
def test_other_forms_are_refused_not_guessed(key: str, value: Any) -> None:
    with pytest.raises(InvalidGraph):
        Graph.from_json({**VALID, key: value})
