"""Tensors of a few of Python's numbers, made by ops that a trace records."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from plantune.graph.tracing.shapes import META

Number = bool | int | float
# Each is filled by an op of its own, once for a program, or in each pass if the module has no
# parameter; more belong into a buffer.
MOST = 64


def constant(data: Any, dtype: torch.dtype | None = None) -> Tensor | None:
    """What torch.tensor makes of nested lists of numbers; None of anything else, or of many."""
    found = _flat(data)
    if found is None or not 0 < len(found[0]) <= MOST:
        return None
    numbers, shape = found
    dtype = dtype or _dtype_of(numbers)
    steps = {after - before for before, after in pairwise(numbers)}
    if dtype == torch.int64 and len(steps) == 1 and 0 not in steps:
        step = int(steps.pop())
        start = int(numbers[0])
        made = torch.arange(start, start + step * len(numbers), step, device=META)
    else:
        each = [torch.full((), number, dtype=dtype, device=META) for number in numbers]
        made = torch.stack(each) if shape else each[0]
    return made if len(shape) < 2 else made.reshape(shape)


def indices(index: Any) -> Any:
    """An index with tensors in the place of lists of numbers."""
    if isinstance(index, tuple):
        return tuple(map(indices, index))
    listed = isinstance(index, list) and all(type(at) is int for at in index)
    made = constant(index) if listed else None
    return index if made is None else made


def _flat(data: Any) -> tuple[list[Number], tuple[int, ...]] | None:
    """The numbers in order, and the shape."""
    if isinstance(data, (bool, int, float)):
        return [data], ()
    if not isinstance(data, (list, tuple)) or not 0 < len(data) <= MOST:
        return None
    parts = [_flat(part) for part in data]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({shape for _, shape in known}) > 1:
        return None
    return [number for numbers, _ in known for number in numbers], (len(parts), *known[0][1])


def _dtype_of(numbers: Sequence[Number]) -> torch.dtype:
    if any(isinstance(number, float) for number in numbers):
        return torch.get_default_dtype()
    whole = all(isinstance(number, bool) for number in numbers)
    return torch.bool if whole else torch.int64
