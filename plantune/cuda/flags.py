"""How the framework computes on a GPU, for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from plantune.scopes import with_values

cudnn: Any = torch.backends.cudnn
_precision: Any = torch._C._get_fp32_precision_getter
_OPS = ("conv", "matmul", "rnn")
# What holds for calls while references are computed otherwise, in whichever thread.
_held: list[tuple[str, ...]] = []
_plain, _changing = ExitStack(), threading.Lock()


def flags(place: Any = cudnn, **values: object) -> AbstractContextManager[None]:
    """Inside, these flags of the framework have these values: cuDNN's, or those of `place`."""
    return with_values(place, **values)


def autotuned(*, deterministic: bool, searches: bool = True) -> AbstractContextManager[None]:
    """Inside, the first call of each convolution tries cuDNN's algorithms, later ones take the
    best, as they do for a plan's rivals; only those that give the same bits each time, if a plan is
    known for that. Without `searches` the first call takes what cuDNN guesses.
    """
    return flags(benchmark=searches, deterministic=deterministic or cudnn.deterministic)


def float32_precisions() -> tuple[str, ...]:
    """What factors of float32 are rounded to on a GPU: in convolutions, in products and in
    recurrent layers.

    Which kernels are legal depends on it, and a user may change it at any time. Torch's core is
    asked, because each call asks: the properties around it take eight times as long.
    """
    held = _held[:1]
    return held[0] if held else tuple(_precision("cuda", op) for op in _OPS)


@contextmanager
def plain_float32() -> Iterator[None]:
    """Inside, sums of float32 products are just that, without tf32."""
    of_products: Any = torch.backends.cuda.matmul
    plain = {"fp32_precision": "ieee"}
    with flags(cudnn.conv, **plain), flags(of_products, **plain):
        yield


@contextmanager
def references_in_float32() -> Iterator[None]:
    """`plain_float32` for what calls are compared with: their own plans stay, in other threads
    too. The first one in sets torch's settings and the last one out puts them back, whichever
    threads these are; nobody waits, since a backward pass may come here in a thread of its own.
    """
    with _changing:
        _held.append(float32_precisions())
        if len(_held) == 1:
            _plain.enter_context(plain_float32())
    try:
        yield
    finally:
        with _changing:
            if len(_held) == 1:
                _plain.close()
            _held.pop()
