"""An input's place that kernels need not have takes no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plantune.runtime.captured.ends import Ends

from ..captured.test_ends import SHAPE, STEPS, Graph, assert_right, call, made, misaligned, permuted


@pytest.fixture
def ends_and_graph() -> tuple[Ends, Graph]:
    ends, graph = made()
    ends.drop()
    return ends, graph


def test_it_is_there_once_something_is_copied(ends_and_graph: tuple[Ends, Graph]) -> None:
    ends, graph = ends_and_graph
    own = graph.program.values["x"]
    assert own.untyped_storage().nbytes() == 0
    for x in (torch.randn(SHAPE), torch.randn(SHAPE)):
        assert_right(call(ends, graph, x), "y", x)
        assert own.untyped_storage().nbytes() == 0
    for x in (misaligned(), torch.randn(SHAPE), permuted()):
        assert_right(call(ends, graph, x), "y", x)
        assert own.untyped_storage().nbytes() == 96


def test_another_capture_finds_plausible_inputs(ends_and_graph: tuple[Ends, Graph]) -> None:
    ends, graph = ends_and_graph
    ends.hold()
    assert torch.equal(graph.program.values["x"], torch.zeros(SHAPE))


def test_what_is_held_stays() -> None:
    ends, graph = made(touched="y")
    call(ends, graph, torch.ones(SHAPE))
    ends.drop()
    ends.hold()
    assert torch.equal(graph.program.values["x"], torch.ones(SHAPE))


@pytest.mark.parametrize("given", [lambda: torch.randn(SHAPE), misaligned, permuted])
def test_a_capture_of_the_callers_copies_into_memory_of_its_own(
    ends_and_graph: tuple[Ends, Graph], given: Any
) -> None:
    ends, graph = ends_and_graph
    x, values = given(), graph.program.values

    def run() -> None:
        for name, step in STEPS.items():
            values[name].copy_(step(values["x"]))

    assert_right(ends.inside_a_capture([x], run), "y", x)
    assert values["x"].untyped_storage().nbytes() == 0
