"""Single calls, and the parts of host and GPU, with a GPU that only counts."""

from __future__ import annotations

import pytest

from plantune.measure import latency
from plantune.measure.gpu_watch import CallWatch
from plantune.measure.latency import gpu_us, host_us, time_latencies

from .test_gpu_watch import Queue, queue  # noqa: F401


@pytest.fixture
def sleeping(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Queue:  # noqa: F811
    def sleep(cycles: int) -> None:
        queue.starting(1, cycles / latency.CYCLES_PER_US)()

    monkeypatch.setattr(latency.torch.cuda, "_sleep", sleep)
    monkeypatch.setattr(latency.torch.cuda, "Event", queue.event)
    return queue


def test_a_single_call_lasts_until_its_result_is_there(sleeping: Queue) -> None:
    calls = [sleeping.starting(5, 300), sleeping.starting(50, 20)]
    found = time_latencies(calls, 1.0, CallWatch(sleeping))
    assert [timing.median_us for timing in found] == pytest.approx([305, 70])
    assert {timing.samples for timing in found} == {latency.MOST_ROUNDS * latency.CALLS_A_TURN}


def test_a_stall_now_and_then_is_kept(sleeping: Queue) -> None:
    counted = [0]

    def call() -> None:
        counted[0] += 1
        sleeping.starting(5, 3000 if counted[0] % 20 == 0 else 30)()

    (found,) = time_latencies([call], 1.0, CallWatch(sleeping))
    assert found.median_us == pytest.approx(35)
    assert found.percentile_us(99) == pytest.approx(3005)


def test_host_and_gpu_are_told_apart(sleeping: Queue) -> None:
    for host, work in ((5, 300), (300, 20)):
        call = sleeping.starting(host, work)
        took = host_us(call, sleeping)
        assert took == pytest.approx(host)
        assert gpu_us(call, sleeping, took) == pytest.approx(work)
