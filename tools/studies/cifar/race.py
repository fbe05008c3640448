"""Steps of several variants in turns, on one batch: single runs drift with the machine.

A turn is some steps in a row, as a training loop takes them: the host may be ahead of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from batches import Batch
from training import Trained
from variants import OURS

from plantune.base.scopes import with_values
from plantune.devices.cuda.flags import cudnn
from plantune.devices.gpus import device_for
from plantune.devices.machine import arch_of
from plantune.measure.timing import Effort, ratio_interval, time_interleaved
from plantune.measure.watches import call_watch
from plantune.space.arch import load_arch

STEPS = 8


def raced(trained: Sequence[Trained], batch: Batch, seconds: float) -> dict[str, Any]:
    """Milliseconds of each, and ours as a part of the framework's best, with a 95 % interval.

    Steps train on: they are the real ones.
    """
    device = device_for(load_arch(arch_of(batch[0].device)))
    calls = [call_of(each, batch) for each in trained]
    effort = Effort(budget_s=seconds, warm_up_s=seconds / 20, retries=0)
    with with_values(cudnn, benchmark=True):
        for call in calls:
            call()
        turns = [_in_a_row(call) for call in calls]
        found = time_interleaved(turns, effort, call_watch(device))
    timings = [turn.per(STEPS) for turn in found]
    names = [each.variant.name for each in trained]
    times = {
        name: {"median_ms": t.median_us / 1e3, "low_ms": t.low_us / 1e3, "high_ms": t.high_us / 1e3}
        for name, t in zip(names, timings, strict=True)
    }
    rivals = [at for at, name in enumerate(names) if name not in OURS]
    best = min(rivals, key=lambda at: timings[at].median_us, default=None)
    ratios = {}
    for at, name in enumerate(names):
        if name in OURS and best is not None:
            interval = ratio_interval(timings[at], timings[best])
            ratios[name] = {"ratio": interval.ratio, "low": interval.low, "high": interval.high}
    return {
        "steps_in_a_row": STEPS,
        "rows": times,
        "best_rival": None if best is None else names[best],
        "ratios": ratios,
    }


def _in_a_row(call: Callable[[], None]) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(STEPS):
            call()

    return turn


def call_of(trained: Trained, batch: Batch) -> Callable[[], None]:
    images, labels = batch
    if trained.variant.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)

    def call() -> None:
        trained.step(images, labels, _unmarked)

    return call


def _unmarked(name: str) -> None:
    """The phases are not recorded."""
