"""An input's place that kernels need not have takes no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plantune.runtime.captured.io_binding import IoBinding

from ..captured.test_io_binding import (
    SHAPE,
    STEPS,
    Graph,
    assert_right,
    call,
    made,
    misaligned,
    permuted,
)


@pytest.fixture
def binding_and_graph() -> tuple[IoBinding, Graph]:
    binding, graph = made()
    binding.drop()
    return binding, graph


def test_it_is_there_once_something_is_copied(binding_and_graph: tuple[IoBinding, Graph]) -> None:
    binding, graph = binding_and_graph
    own = graph.program.values["x"]
    assert own.untyped_storage().nbytes() == 0
    for x in (torch.randn(SHAPE), torch.randn(SHAPE)):
        assert_right(call(binding, graph, x), "y", x)
        assert own.untyped_storage().nbytes() == 0
    for x in (misaligned(), torch.randn(SHAPE), permuted()):
        assert_right(call(binding, graph, x), "y", x)
        assert own.untyped_storage().nbytes() == 96


def test_another_capture_finds_plausible_inputs(binding_and_graph: tuple[IoBinding, Graph]) -> None:
    binding, graph = binding_and_graph
    binding.allocate()
    assert torch.equal(graph.program.values["x"], torch.zeros(SHAPE))


def test_what_is_held_stays() -> None:
    binding, graph = made(touched="y")
    call(binding, graph, torch.ones(SHAPE))
    binding.drop()
    binding.allocate()
    assert torch.equal(graph.program.values["x"], torch.ones(SHAPE))


@pytest.mark.parametrize("given", [lambda: torch.randn(SHAPE), misaligned, permuted])
def test_a_capture_of_the_callers_copies_into_memory_of_its_own(
    binding_and_graph: tuple[IoBinding, Graph], given: Any
) -> None:
    binding, graph = binding_and_graph
    x, values = given(), graph.program.values

    def run() -> None:
        for name, step in STEPS.items():
            values[name].copy_(step(values["x"]))

    assert_right(binding.inside_a_capture([x], run), "y", x)
    assert values["x"].untyped_storage().nbytes() == 0
