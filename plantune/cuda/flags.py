"""How the framework computes on a GPU, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

cudnn: Any = torch.backends.cudnn


@contextmanager
def flags(place: Any = cudnn, **values: object) -> Iterator[None]:
    """Inside, these attributes of `place` have these values."""
    before = {name: getattr(place, name) for name in values}
    try:
        for name, value in values.items():
            setattr(place, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(place, name, value)


def autotuned(*, deterministic: bool) -> AbstractContextManager[None]:
    """Inside, the first call of each convolution tries cuDNN's algorithms, later ones take the
    best, as they do for a plan's rivals; only those that give the same bits each time, if a plan is
    known for that.
    """
    return flags(benchmark=True, deterministic=deterministic or cudnn.deterministic)


@contextmanager
def plain_float32() -> Iterator[None]:
    """Inside, sums of float32 products are just that, without tf32."""
    of_products: Any = torch.backends.cuda.matmul
    with flags(cudnn.conv, fp32_precision="ieee"), flags(of_products, fp32_precision="ieee"):
        yield
