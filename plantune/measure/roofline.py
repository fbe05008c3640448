"""The least time that a step can take on this machine; what claims less was not measured right."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from plantune.graph.step import Step
from plantune.graph.types import DTYPES
from plantune.kernels.family import Candidate
from plantune.kernels.registry import family_named

# Winograd and Karatsuba make down to a quarter of the products that a step counts, and the
# product that is measured here may reach but half of the peak.
FEWER_FLOPS = 8
# Results may stay in a nearer cache than what is measured here fills.
NEARER_CACHE = 4
MEASURE_S = 0.05
GEMM_SIZE = 512
FILL_BYTES = 1 << 18


def least_us(step: Step, candidate: Candidate) -> float:
    """No launch of this candidate can be shorter, however good it is.

    Only outputs count as moved: of an input a step may need a part, or have prepared it.
    """
    family, config = family_named(candidate.family), candidate.config
    views = family.aliases(step, config)
    made = [type_ for name, type_ in step.outputs if name not in views]
    if not made:
        return 0.0
    # The peak of float32 where that is higher: a kernel may convert.
    dtypes = {"float32", *(type_.dtype for type_ in made if type_.is_float)}
    peak = max(flops_per_us(dtype, torch.get_num_threads()) for dtype in dtypes)
    written = sum(type_.size_bytes for type_ in made) / bytes_per_us(torch.get_num_threads())
    return max(step.flops / peak / FEWER_FLOPS, written / NEARER_CACHE)


@cache
def flops_per_us(dtype: str, threads: int) -> float:
    """What this machine reaches in a product of two square matrices."""
    a, b, c = (torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=DTYPES[dtype]) for _ in range(3))
    return 2 * GEMM_SIZE**3 / _best_us(lambda: torch.mm(a, b, out=c))


@cache
def bytes_per_us(threads: int) -> float:
    """How fast this machine fills a buffer that its caches hold, by all threads."""
    each = torch.empty(FILL_BYTES, dtype=torch.uint8)
    return threads * FILL_BYTES / _best_us(lambda: each.fill_(1))


def forget() -> None:
    """The peaks are measured again: something else may have run here the first time."""
    flops_per_us.cache_clear()
    bytes_per_us.cache_clear()


def _best_us(call: Callable[[], object]) -> float:
    best, end = float("inf"), time.perf_counter() + MEASURE_S
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, (time.perf_counter() - start) * 1e6)
    return best
