"""How long a user waits for a single call, and what of it the host and the GPU take."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence

import torch

from plantune.devices.cuda.capture import no_collection
from plantune.devices.device import Device, Runnable
from plantune.measure.timing import Effort, Timing, order_of_round
from plantune.measure.watches import HOST, Watch, kernel_watch

# Single calls in a row before the next route has its turn: as many as fit into so long, within
# these. A 99th percentile needs hundreds, and five each turn were 70 (H200, 2026-11-22).
TURN_US = 2000.0
FEWEST_A_TURN, MOST_A_TURN = 5, 40
LEAST_ROUNDS = 4
MOST_ROUNDS = 80
# How often host and GPU are timed, and calls each time: few enough for the queue of launches.
HOST_TURNS, REPEATS = 24, 15
# Calls that refill the host's caches after another route's turn.
WARMING_CALLS = 4
CALLS_QUEUED = 4
# A GPU waits for so many cycles while calls are queued: longer than the host needs, at any clock.
CYCLES_PER_US = 2500
LEAST_WAIT_US = 100.0


def time_latencies(calls: Sequence[Runnable], effort: Effort, watch: Watch) -> list[Timing]:
    """Single calls until their result is there, in turns; no sample is discarded, slow ones count.

    Each turn starts with a call that is not timed. When the effort is over, one call of each route
    is all.
    """
    samples: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter_ns() + effort.budget_s * 1e9
    gc.collect(1)
    with no_collection():
        for number in range(MOST_ROUNDS):
            if number >= LEAST_ROUNDS and time.perf_counter_ns() > end:
                break
            if number and effort.is_over:
                break
            for place in order_of_round(len(calls), number):
                calls[place]()
                samples[place] += _turn_us(calls[place], effort, watch)
    return [Timing(tuple(taken)) for taken in samples]


def _turn_us(call: Runnable, effort: Effort, watch: Watch) -> list[float]:
    first = watch.batch_us(call, 1)
    fitting = int(TURN_US / max(first, 1.0))
    turn = 1 if effort.is_over else min(max(fitting, FEWEST_A_TURN), MOST_A_TURN)
    return [first, *(watch.batch_us(call, 1) for _ in range(turn - 1))]


def host_us(calls: Sequence[Runnable], device: Device) -> list[float]:
    """What each call takes of the host before it returns, in a row of calls for which the GPU has
    time, with warm caches.

    In turns, because hosts have slow spells: of routes that were timed one after the other, in 3 ms
    each, one took 39 us beside 15 for its twin (H200, 2026-11-22).
    """
    taken: list[list[float]] = [[] for _ in calls]
    gc.collect(1)
    with no_collection():
        for _ in range(HOST_TURNS):
            for call, times_us in zip(calls, taken, strict=True):
                for _ in range(WARMING_CALLS):
                    device.synchronize()
                    call()
                times_us.append(HOST.batch_us(call, CALLS_QUEUED - 1))
        device.synchronize()
    return [statistics.median(times_us) for times_us in taken]


def gpu_us(call: Runnable, device: Device, host_us: float) -> float:
    """What a call takes of the GPU if the host is far ahead: calls are queued while it waits."""
    watch, wait_us = kernel_watch(device), 2 * host_us * CALLS_QUEUED + LEAST_WAIT_US

    def once() -> float:
        device.synchronize()
        torch.cuda._sleep(int(wait_us * CYCLES_PER_US))
        return watch.batch_us(call, CALLS_QUEUED)

    return statistics.median(once() for _ in range(REPEATS))
