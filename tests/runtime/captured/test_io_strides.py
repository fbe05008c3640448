"""The strides of outputs that a pass leaves in the caller's memory."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from .test_io_binding import SHAPE, Followed, assert_right, call, made, permuted


@pytest.fixture(autouse=True, params=[True, False], ids=["direct", "met"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one input and one output a pass may be one function."""
    monkeypatch.setattr(Followed, "is_direct", request.param)


class Asked:
    """Says strides for each input by its own."""

    rows = ()
    are_due = False

    def __init__(self, known: dict[tuple[int, ...], Any]) -> None:
        self._known = known

    def of(self, inputs: Sequence[Tensor]) -> Any:
        return self._known.get(inputs[0].stride())


ROWS, PIXELS, TURNED = (12, 4, 4, 1), (12, 1, 12, 3), (12, 1, 3, 3)


class TestStridesOfOutputs:
    """As eager has them for these inputs."""

    def test_one_that_kernels_write_so_is_written_in_place(self) -> None:
        binding, graph = made()
        graph.program.values["y"] = torch.zeros(SHAPE).to(memory_format=torch.channels_last)
        binding = Followed(graph.program, [graph.program.values["x"]])  # type: ignore[arg-type]
        binding.come_as(Asked({ROWS: (PIXELS,)}))  # type: ignore[arg-type]
        binding.serve(graph)  # type: ignore[arg-type]
        x = torch.randn(SHAPE)
        (y,) = call(binding, graph, x)
        assert_right([y], "y", x)
        assert y.stride() == PIXELS
        assert graph.told["y"] == [y.data_ptr()]

    def test_kernels_are_told_where_it_is_copied_from_if_another_call_wants_others(self) -> None:
        """What they were told last is a result that the caller has."""
        binding, graph = made()
        binding.come_as(Asked({ROWS: (ROWS,), TURNED: (TURNED,)}))  # type: ignore[arg-type]
        held = []
        for x in (torch.randn(SHAPE), permuted(), torch.randn(SHAPE), permuted(), permuted()):
            (y,) = call(binding, graph, x)
            assert y.stride() == x.stride()
            held.append((y, x))
        for y, x in held:
            assert_right([y], "y", x)
        own = graph.program.values["y"].data_ptr()
        assert [address == own for address in graph.told["y"]] == [False, True, False, True]

    def test_after_a_weight_was_moved_eager_is_asked_again(self) -> None:
        binding, graph = made()
        asked = Asked({ROWS: (ROWS,)})
        binding.come_as(asked)  # type: ignore[arg-type]
        for _ in range(3):
            (y,) = call(binding, graph, torch.randn(SHAPE))
            assert y.stride() == ROWS
        asked._known[ROWS] = (PIXELS,)
        asked.are_due = True
        x = torch.randn(SHAPE)
        (y,) = call(binding, graph, x)
        assert y.stride() == PIXELS
        assert_right([y], "y", x)

    def test_those_of_rows_are_not_asked_for(self) -> None:
        binding, graph = made()
        binding.follow([torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)])
        binding.come_as(SimpleNamespace(rows=(None,)))  # type: ignore[arg-type]
        (y,) = call(binding, graph, torch.randn(SHAPE))
        assert y.stride() == (12, 4, 4, 1)

    def test_where_eager_cannot_be_asked_they_are_likely_ones(self) -> None:
        binding, graph = made()
        binding.come_as(Asked({}))  # type: ignore[arg-type]
        binding.follow([torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)])
        (y,) = call(binding, graph, torch.randn(SHAPE))
        assert y.stride() == PIXELS
