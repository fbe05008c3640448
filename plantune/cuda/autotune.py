"""Has cuDNN time its algorithms for what the framework runs of a plan, as its rivals do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def autotuned(*, deterministic: bool) -> Iterator[None]:
    """Inside, the first call of each convolution tries cuDNN's algorithms, later ones take the
    best; only those that give the same bits each time, if a plan is known for that.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = True, deterministic or cudnn.deterministic
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before
