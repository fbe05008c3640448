"""torch.distributions without their looks at the values of their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_validation() -> Iterator[None]:
    """Inside, a distribution takes its arguments as they are, unless it is told `validate_args`:
    a trace has no values. So do those of other threads meanwhile. torch.compile turns the looks
    off once for all.
    """
    known = torch.distributions.Distribution
    before = known._validate_args
    known.set_default_validate_args(False)
    try:
        yield
    finally:
        known.set_default_validate_args(before)
