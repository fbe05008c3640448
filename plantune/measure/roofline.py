"""The least time that a step can take on this machine; what claims less was not measured right."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from plantune.devices.device import Device
from plantune.graph.step import Step
from plantune.graph.types import DTYPES
from plantune.kernels.resolved import ResolvedStep
from plantune.measure.threads import threads
from plantune.measure.watches import kernel_watch

# Winograd and Karatsuba make down to a quarter of the products that a step counts, and the
# product that is measured here may reach but half of the peak.
FEWER_FLOPS = 8
# Results may stay in a nearer cache than the one that is measured here.
NEARER_CACHE = 4
MEASURE_S = 0.05


@dataclass(frozen=True)
class Yardstick:
    """What is measured on a kind of processor: a product that keeps it busy, and a buffer that its
    caches hold. Of the dtypes, `fastest` is always one: a kernel may convert.
    """

    product_size: int
    fill_bytes: int
    fastest: str
    calls: int = 1


ON_CPU = Yardstick(256, 1 << 18, "float32")
ON_GPU = Yardstick(4096, 32 << 20, "float16", calls=10)


def least_us(chosen: ResolvedStep, device: Device) -> float:
    """No launch of this candidate can be shorter, however good it is.

    Only outputs count as moved: of an input a step may need a part, or have prepared it.
    """
    step, views = chosen.step, chosen.family.aliases(chosen.parts, chosen.config)
    made = [type_ for name, type_ in step.outputs if name not in views]
    if not made:
        return 0.0
    written = sum(type_.size_bytes for type_ in made) / bytes_per_us(device)
    return max(step.flops / peak(step, device) / FEWER_FLOPS, written / NEARER_CACHE)


def step_us(step: Step, device: Device) -> float:
    """What arithmetic and traffic take at this machine's best, as the graph defines them.

    Winograd and Karatsuba tiles need fewer products than that, so they may be below it.
    """
    return max(step.flops / peak(step, device), step.traffic_bytes / bytes_per_us(device))


def peak(step: Step, device: Device) -> float:
    """What the machine reaches in products of the step's dtypes, per microsecond."""
    own = {type_.dtype for _, type_ in step.outputs if type_.is_float}
    return max(flops_per_us(dtype, device) for dtype in (_yardstick(device).fastest, *own))


def flops_per_us(dtype: str, device: Device) -> float:
    """What this machine reaches in a product of two square matrices."""
    threads = _workers(device)
    measured = partial(_measured_flops_per_us, dtype, device)
    return threads * _peak(dtype, device, threads, measured)


def bytes_per_us(device: Device) -> float:
    """How fast this machine fills a buffer that its caches hold, by all threads."""
    threads = _workers(device)
    return threads * _peak("fill", device, threads, partial(_measured_bytes_per_us, device))


def _workers(device: Device) -> int:
    """How many times what is measured runs at once. On a CPU one thread is measured: several wait
    for each other wherever something else runs.
    """
    return 1 if device.captures else torch.get_num_threads()


def look_again() -> None:
    """The peaks are measured again, as something else may have run here the first time; the best
    that was ever seen counts.
    """
    _stale.update(_peaks)


def _yardstick(device: Device) -> Yardstick:
    return ON_GPU if device.captures else ON_CPU


# By what is measured, where, and by how many threads; some are to be measured again.
_peaks: dict[tuple[str, Device, int], float] = {}
_stale: set[tuple[str, Device, int]] = set()


def _peak(what: str, device: Device, threads: int, measure: Callable[[], float]) -> float:
    key = (what, device, threads)
    if key not in _peaks or key in _stale:
        _stale.discard(key)
        _peaks[key] = max(_peaks.get(key, 0.0), measure())
    return _peaks[key]


def _measured_flops_per_us(dtype: str, device: Device) -> float:
    size = _yardstick(device).product_size
    a, b, c = (torch.ones(size, size, dtype=DTYPES[dtype], device=device.place) for _ in range(3))
    return 2 * size**3 / _best_us(lambda: torch.mm(a, b, out=c), device)


def _measured_bytes_per_us(device: Device) -> float:
    size = _yardstick(device).fill_bytes
    each = torch.empty(size, dtype=torch.uint8, device=device.place)
    return size / _best_us(lambda: each.fill_(1), device)


def _best_us(call: Callable[[], object], device: Device) -> float:
    calls = _yardstick(device).calls

    def batch() -> None:
        for _ in range(calls):
            call()

    best = math.inf
    with device.own_stream(), threads(1):
        batch()
        repeated, watch = device.captured(batch), kernel_watch(device)
        end = time.perf_counter() + MEASURE_S
        while time.perf_counter() < end:
            best = min(best, watch.batch_us(repeated, 1) / calls)
    return best
