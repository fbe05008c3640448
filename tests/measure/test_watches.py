"""The clocks of a GPU, with a GPU that only counts."""

from __future__ import annotations

import pytest

from plantune.devices.device import CPU, Device
from plantune.measure import watches
from plantune.measure.timing import Effort, time_call, time_interleaved
from plantune.measure.watches import (
    HOST,
    CallWatch,
    ColdWatch,
    KernelWatch,
    call_watch,
    kernel_watch,
)


class Queue(Device):
    """Work takes its time after the call that starts it."""

    captures = True

    def __init__(self) -> None:
        self.now_us = 1e9
        self.busy_until_us = 0.0

    def starting(self, host_us: float, work_us: float):
        def call() -> None:
            self.now_us += host_us
            self.busy_until_us = max(self.busy_until_us, self.now_us) + work_us

        return call

    def synchronize(self) -> None:
        self.now_us = max(self.now_us, self.busy_until_us)

    def event(self, enable_timing: bool):
        return Event(self)


class Event:
    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._at_us = 0.0

    def record(self) -> None:
        self._at_us = max(self._queue.now_us, self._queue.busy_until_us)

    def synchronize(self) -> None:
        self._queue.now_us = max(self._queue.now_us, self._at_us)

    def elapsed_time(self, other: Event) -> float:
        return (other._at_us - self._at_us) / 1e3


@pytest.fixture
def queue(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(watches.time, "perf_counter_ns", lambda: int(queue.now_us * 1e3))
    monkeypatch.setattr(watches, "waited_ns", lambda: 0)
    monkeypatch.setattr(watches, "is_slowed", lambda index: False)
    monkeypatch.setattr(watches.torch.cuda, "Event", queue.event)
    return queue


def test_a_call_takes_until_its_work_is_done(queue):
    found = time_call(queue.starting(5, 300), Effort(), CallWatch(queue))
    assert found.median_us == pytest.approx(300, rel=0.01)


def test_a_slow_host_is_a_part_of_a_call(queue):
    found = time_call(queue.starting(300, 20), Effort(), CallWatch(queue))
    assert found.median_us == pytest.approx(300, rel=0.02)


def test_a_kernels_time_is_that_of_the_gpu(queue):
    found = time_call(queue.starting(3, 150), Effort(), KernelWatch(queue))
    assert found.median_us == pytest.approx(150, rel=0.005)
    assert found.per(50).median_us == pytest.approx(3, rel=0.005)


def test_calls_in_turns_do_not_pay_for_each_other(queue):
    calls = [queue.starting(5, 900), queue.starting(5, 100)]
    slow, fast = time_interleaved(calls, Effort(), CallWatch(queue))
    assert slow.median_us == pytest.approx(900, rel=0.02)
    assert fast.median_us == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize("watch", [CallWatch, KernelWatch])
def test_samples_under_throttling_are_discarded(queue, monkeypatch, watch):
    """The GPU is slowed down by half in one of three stretches of 20 ms."""

    def throttled(index=None):
        return queue.now_us // 20_000 % 3 == 0

    def call():
        queue.now_us += 2
        queue.busy_until_us = max(queue.busy_until_us, queue.now_us) + 200 * (1 + throttled())
        queue.now_us = queue.busy_until_us

    monkeypatch.setattr(watches, "is_slowed", throttled)
    found = time_call(call, Effort(budget_s=0.5, tolerance=0), watch(queue))
    assert found.median_us == pytest.approx(202, rel=0.02)
    assert found.high_us == pytest.approx(202, rel=0.02)
    assert not found.noisy


def test_what_is_throttled_all_the_time_is_noisy(queue, monkeypatch):
    monkeypatch.setattr(watches, "is_slowed", lambda index: True)
    found = time_call(queue.starting(3, 150), Effort(budget_s=0.1, retries=1), KernelWatch(queue))
    assert found.shared
    assert found.noisy


def test_the_cpu_has_the_hosts_clock(queue):
    assert call_watch(CPU) is HOST
    assert type(kernel_watch(CPU)) is ColdWatch
    assert type(call_watch(queue)) is CallWatch
    assert type(kernel_watch(queue)) is KernelWatch
