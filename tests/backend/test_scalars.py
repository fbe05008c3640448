"""A piece that computes a few numbers from numbers is left to torch, without a word."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plantune import UnplannedCall
from plantune.backend.limits import SCALARS
from plantune.errors import PlantuneWarning

from .compiled import assert_alike, compiled, ran, refused


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Nothing of plantune's is said in these tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlantuneWarning)
        yield


SCALES = {
    "of a loss": (lambda a, b: (0.5 * a + 2 * b, (a - b).exp()), ()),
    "of one element": (lambda a, b: a * b + 1, (1,)),
    "of a matrix of one element": (lambda a, b: a @ b, (1, 1)),
}


@pytest.mark.parametrize(("function", "shape"), SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("trains", [False, True])
def test_numbers_alone_are_torchs(
    function: Callable[..., Any], shape: tuple[int, ...], trains: bool
) -> None:
    fast = compiled(function)
    given = [torch.randn(shape, requires_grad=trains) for _ in range(2)]
    for _ in range(2):
        assert_alike(fast(*given), function(*given))
    assert refused() == [SCALARS]
    assert ran() == (0, 2)
    if trains:
        made = fast(*given)
        total = made if isinstance(made, Tensor) else sum(made)
        total.sum().backward()
        assert all(x.grad is not None for x in given)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo asks
def test_what_comes_after_a_break_of_the_graph_is_torchs() -> None:
    """As a penalty that is added to a loss, which was printed."""
    layer = nn.Linear(3, 4)

    def step(x: Tensor) -> Tensor:
        loss = layer(x).square().mean()
        torch._dynamo.graph_break()
        return loss * 0.5 + 1

    fast, x = compiled(step), torch.randn(2, 3)
    assert_alike(fast(x), step(x))
    assert refused() == [SCALARS]
    assert ran() == (1, 1)


PLANNED: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "a sum": (lambda x: x.sum(), (4, 3)),
    "an expansion": (lambda x: (x * 2).expand(5) + 1, ()),
    "a vector within": (lambda x: (x * torch.arange(3.0)).sum(), ()),
    "a parameter": (nn.Linear(1, 3), (2, 1)),
}


@pytest.mark.parametrize(("function", "shape"), PLANNED.values(), ids=PLANNED)
def test_whatever_has_more_elements_is_planned(
    function: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape)
    assert_alike(compiled(function)(x), function(x))
    assert refused() == []
    assert ran() == (1, 0)


def test_other_reasons_are_said_as_before() -> None:
    module = nn.Linear(3, 3)
    fast, x = compiled(lambda x, scale: module(x) * scale), torch.randn(2, 3)
    fast(x, 1.0)
    with pytest.raises(UnplannedCall, match="give it as a tensor"):
        fast(x, 0.5)
