"""The table of tolerances, beside PyTorch's own error on typical steps, measured here."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from plantune.base.tolerances import (
    CANCELS,
    LUCK,
    ONCE_MORE,
    ONE_INPUT,
    ORDER,
    OTHER_ROUTES,
    TABLE,
    WINOGRAD,
    tolerance,
)

DTYPES = ("float64", "float32", "float16", "bfloat16")
# A tolerance of more than a tenth of PyTorch's own error, by how much more it may be than all of
# it: a new one needs a reason, and none grows unseen.
EXPLAINED = {WINOGRAD: 50, ONCE_MORE: 3, CANCELS: 50, ONE_INPUT: 3, OTHER_ROUTES: 200}

Step = tuple[Callable[..., Tensor], list[Tensor]]


def steps(dtype: torch.dtype) -> dict[str, Step]:
    """Each with inputs of that dtype."""

    def drawn(*shape: int, fan: int = 1) -> Tensor:
        return (torch.randn(shape) / fan**0.5).to(dtype)

    image = drawn(2, 64, 16, 16)
    return {
        "3x3": (functional.conv2d, [image, drawn(64, 64, 3, 3, fan=576), drawn(64)]),
        "1x1": (functional.conv2d, [image, drawn(64, 64, 1, 1, fan=64), drawn(64)]),
        "linear": (functional.linear, [drawn(32, 512), drawn(256, 512, fan=512), drawn(256)]),
        "epilogue": (
            lambda x, scale, shift: torch.relu(x * scale + shift),
            [image, drawn(64, 1, 1), drawn(64, 1, 1)],
        ),
        "gate": (lambda x, y: torch.sigmoid(x) * y, [image, drawn(2, 64, 16, 16)]),
        "pool": (lambda x: x.mean((2, 3)), [drawn(16, 64, 16, 16)]),
    }


def own_error(run: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    """PyTorch's, by norm, as a part of the result's."""
    exact = run(*(x.double() for x in inputs))
    return float((run(*inputs).double() - exact).norm() / exact.norm())


@pytest.fixture(scope="module", params=DTYPES[1:])
def smallest(request: pytest.FixtureRequest) -> tuple[str, float]:
    """A dtype, and PyTorch's smallest own error with it. In float64 there is nothing to compare."""
    dtype = getattr(torch, request.param)
    return request.param, min(own_error(*step) for step in steps(dtype).values())


@pytest.mark.parametrize("of", TABLE)
def test_it_is_a_tenth_of_pytorchs_own_error_or_explained(
    smallest: tuple[str, float], of: str
) -> None:
    dtype, own = smallest
    most = EXPLAINED.get(TABLE[of][dtype].reason, 0.1)
    assert tolerance(of, dtype, elements=1024) <= most * own


@pytest.mark.parametrize(("of", "dtype"), [*itertools.product(TABLE, DTYPES)])
def test_each_has_its_reason(of: str, dtype: str) -> None:
    assert TABLE[of][dtype].reason in (*EXPLAINED, ORDER, LUCK)
    assert (TABLE[of][dtype].reason == ORDER) == (dtype == "float64")


def test_luck_goes_down_with_the_number_of_elements() -> None:
    assert tolerance("network", torch.float16) == 2**-11
    assert tolerance("network", torch.float16, 10_000) == 2**-11 / 100
    assert tolerance("step", torch.float16, 10_000) == 2**-11


@pytest.mark.parametrize("of", TABLE)
def test_what_is_counted_is_exact(of: str) -> None:
    assert tolerance(of, torch.int64) == 0
