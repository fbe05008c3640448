"""How the framework computes on a GPU, for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from plantune.base.scopes import with_values

cudnn: Any = torch.backends.cudnn
_get, _set = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
# Of torch's settings, what is not set itself follows those before it.
PRECISION_OF = ("conv", "matmul", "rnn")
_SETTINGS = (("generic", "all"), *(("cuda", op) for op in ("all", *PRECISION_OF)))
# What torch may round factors of float32 to. Where nothing was set it says "none": "ieee".
UNSET = "none"
PRECISIONS = ("ieee", "tf32", "bf16")
Precisions = tuple[str, ...]


class _Making(threading.local):
    """For what this thread makes a plan."""

    precisions: Precisions | None = None


class _References:
    """How many are computed now, in whichever thread, and what holds for calls meanwhile."""

    count = 0
    precisions: Precisions | None = None


_making, _references = _Making(), _References()
_plain, _changing = ExitStack(), threading.Lock()


def flags(place: Any = cudnn, **values: object) -> AbstractContextManager[None]:
    """Inside, these flags of the framework have these values: cuDNN's, or those of `place`."""
    return with_values(place, **values)


def autotuned(*, deterministic: bool, searches: bool = True) -> AbstractContextManager[None]:
    """Inside, the first call of each convolution tries cuDNN's algorithms, later ones take the
    best, as they do for the framework's routes; only those that give the same bits each time, if a
    plan is known for that. Without `searches` the first call takes what cuDNN guesses.
    """
    return flags(benchmark=searches, deterministic=deterministic or cudnn.deterministic)


def precisions_of_calls() -> Precisions:
    """What factors of float32 are rounded to on a GPU: in convolutions, in products and in
    recurrent layers.

    Which kernels are legal depends on it, and a user may change it at any time. Torch's core is
    asked, one by one, because each call asks: the properties around it take eight times as long.
    """
    fixed = _references.precisions
    return fixed or (_get("cuda", "conv"), _get("cuda", "matmul"), _get("cuda", "rnn"))


def set_precisions(precisions: Precisions) -> None:
    """Torch's settings become these, by its earlier switches too, so that neither contradicts."""
    conv, matmul, rnn = precisions
    if conv == rnn:
        torch._C._set_cudnn_allow_tf32(conv == "tf32")
    torch._C._set_cublas_allow_tf32(matmul == "tf32")
    for op, precision in zip(PRECISION_OF, precisions, strict=True):
        if _get("cuda", op) != precision:
            _set("cuda", op, precision)


def float32_precisions() -> Precisions:
    """Those for which this thread makes a plan, else those of calls."""
    precisions = _making.precisions or precisions_of_calls()
    return tuple("ieee" if precision == UNSET else precision for precision in precisions)


def planned_for(precisions: Precisions | None) -> AbstractContextManager[None]:
    """Inside, this thread makes a plan for these, whatever another thread sets meanwhile."""
    return with_values(_making, precisions=precisions)


@contextmanager
def plain_float32() -> Iterator[None]:
    """Inside, sums of float32 products are just that, without tf32.

    Torch cannot be told that a setting follows another one again. So those that more follow come
    first, and only those are set that are not yet as they should be.
    """
    before = [(place, _get(*place)) for place in _SETTINGS]
    try:
        for place in _SETTINGS:
            if _get(*place) != "ieee":
                _set(*place, "ieee")
        yield
    finally:
        for place, precision in before:
            if _get(*place) != precision:
                _set(*place, precision)


@contextmanager
def references_in_float32() -> Iterator[None]:
    """`plain_float32` for what calls are compared with: their own plans stay, in other threads
    too. The first one in sets torch's settings and the last one out puts them back, whichever
    threads these are; nobody waits, since a backward pass may come here in a thread of its own.
    """
    with _changing:
        if not _references.count:
            _references.precisions = precisions_of_calls()
            _plain.enter_context(plain_float32())
        _references.count += 1
    try:
        yield
    finally:
        with _changing:
            _references.count -= 1
            if not _references.count:
                _plain.close()
                _references.precisions = None
