"""One check for every op: its meaning is the formula, its types are what it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.graph.ops import OPS
from plantune.graph.types import TensorType, dtype_name

FORMATS = torch.contiguous_format, torch.channels_last


def orders(inputs: list[Tensor]) -> Iterator[list[Tensor]]:
    """The same images with one of them in channels_last, then with all others so: what is read
    together in a plan need not have one order.
    """
    images = {at for at, x in enumerate(inputs) if x.dim() == 4}
    for one in images:
        for last in ({one}, images - {one}):
            yield [x.contiguous(memory_format=FORMATS[at in last]) for at, x in enumerate(inputs)]


def check(case: Any) -> None:
    *first, last = case.shapes
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in first]
    inputs.append(case.draw(last, dtype=torch.float64))
    expected = case.formula(*inputs)
    before = [tensor.clone() for tensor in inputs]

    op, attrs = OPS[case.op], Attrs(case.attrs)
    results = op.evaluate(inputs, attrs)

    types = op.infer([TensorType(tuple(t.shape), dtype_name(t.dtype)) for t in inputs], attrs)
    assert [(tuple(r.shape), r.dtype) for r in results] == [(t.shape, t.torch_dtype) for t in types]
    expected = expected if isinstance(expected, tuple) else (expected,)
    for ordered in (inputs, *orders(inputs)):
        for got, wanted in zip(op.evaluate(ordered, attrs), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    # An op writes to nothing that it was given: not even the running statistics.
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


@pytest.fixture
def check_meaning() -> Callable[[Any], None]:
    return check
