"""How the framework computes on a GPU, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from plantune.scopes import with_values

cudnn: Any = torch.backends.cudnn


def flags(place: Any = cudnn, **values: object) -> AbstractContextManager[None]:
    """Inside, these flags of the framework have these values: cuDNN's, or those of `place`."""
    return with_values(place, **values)


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
    plain = {"fp32_precision": "ieee"}
    with flags(cudnn.conv, **plain), flags(of_products, **plain):
        yield
