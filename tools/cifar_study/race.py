"""Steps of several variants in turns, on one batch: single runs drift with the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from batches import Batch
from training import Trained
from variants import OURS

from plantune.cuda.flags import flags
from plantune.gpus import device_for
from plantune.machine import arch_of
from plantune.measure.timing import Effort, ratio_interval, time_interleaved
from plantune.measure.watches import call_watch
from plantune.space.arch import load_arch


def raced(trained: Sequence[Trained], batch: Batch, seconds: float) -> dict[str, Any]:
    """Milliseconds of each, and ours as a part of the framework's best, with a 95 % interval.

    Steps train on: they are the real ones.
    """
    device = device_for(load_arch(arch_of(batch[0].device)))
    calls = [call_of(each, batch) for each in trained]
    effort = Effort(budget_s=seconds, warm_up_s=seconds / 20, retries=0)
    on_own = device.own_stream() if batch[0].is_cuda else nullcontext()
    with on_own, flags(benchmark=True):
        for call in calls * 2:
            call()
        timings = time_interleaved(calls, effort, call_watch(device))
    names = [each.variant.name for each in trained]
    found = {
        name: {"ms": t.median_us / 1e3, "low_ms": t.low_us / 1e3, "high_ms": t.high_us / 1e3}
        for name, t in zip(names, timings, strict=True)
    }
    rivals = [at for at, name in enumerate(names) if name not in OURS]
    best = min(rivals, key=lambda at: timings[at].median_us, default=None)
    ratios = {}
    for at, name in enumerate(names):
        if name in OURS and best is not None:
            interval = ratio_interval(timings[at], timings[best])
            ratios[name] = [interval.ratio, interval.low, interval.high]
    return {"rows": found, "best_rival": None if best is None else names[best], "ratios": ratios}


def call_of(trained: Trained, batch: Batch) -> Callable[[], None]:
    images, labels = batch
    if trained.variant.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)

    def call() -> None:
        trained.step(images, labels, _unmarked)

    return call


def _unmarked(name: str) -> None:
    """The phases are not recorded."""
