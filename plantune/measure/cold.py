"""The clock for single kernels of a CPU: each call finds caches as other kernels leave them."""

from __future__ import annotations

import time
from typing import ClassVar

import torch

from plantune.measure.timing import Call, Watch

# More than the caches that a core has for itself.
BYTES_PER_THREAD = 4 << 20


class ColdWatch(Watch):
    """Between calls all threads write to memory that the call does not use.

    In a network a kernel's weights, inputs and code are not in a core's own caches any more. Timed
    in a row, the steps of a plan for 8 images summed up to 4.2 ms, and the whole took 6.7: small
    ops of the framework look 3 to 5 times as fast, a Winograd of 512 channels 1.6 times, so that
    what is fused or reads fewer weights loses (2 cores of a Xeon and of a Zen 3, 2026-11-22).
    """

    cache: ClassVar[str] = "cold"
    most_calls: ClassVar[float] = 4

    def __init__(self) -> None:
        self._others = torch.zeros(BYTES_PER_THREAD * torch.get_num_threads() // 4)

    def batch_us(self, call: Call, count: int) -> float:
        total_ns = 0
        for _ in range(count):
            self._others.add_(1.0)
            start = time.perf_counter_ns()
            call()
            total_ns += time.perf_counter_ns() - start
        return total_ns / count / 1e3
