"""Single calls, and the parts of host and GPU, with a GPU that only counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plantune.measure.racing import latency
from plantune.measure.racing.latency import gpu_us, host_us, time_latencies
from plantune.measure.timing import Effort
from plantune.measure.watches import CallWatch

from ..test_watches import Queue, queue  # noqa: F401


@pytest.fixture
def sleeping(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Queue:  # noqa: F811
    def sleep(cycles: int) -> None:
        queue.starting(1, cycles / latency.CYCLES_PER_US)()

    monkeypatch.setattr(latency.torch.cuda, "_sleep", sleep)
    monkeypatch.setattr(latency.torch.cuda, "Event", queue.event)
    return queue


def test_a_single_call_lasts_until_its_result_is_there(sleeping: Queue) -> None:
    calls = [sleeping.starting(5, 300), sleeping.starting(50, 20)]
    found = time_latencies(calls, Effort(1.0), CallWatch(sleeping))
    assert [timing.median_us for timing in found] == pytest.approx([305, 70])


@pytest.mark.parametrize(("us", "a_turn"), [(10, 40), (95, 20), (900, 5)])
def test_quick_calls_are_many_in_a_turn(sleeping: Queue, us: int, a_turn: int) -> None:
    """For a 99th percentile."""
    calls = [sleeping.starting(5, us), sleeping.starting(5, 300)]
    quick, _ = time_latencies(calls, Effort(1.0), CallWatch(sleeping))
    assert quick.samples == latency.MOST_ROUNDS * a_turn


def test_a_stall_now_and_then_is_kept(sleeping: Queue) -> None:
    counted = [0]

    def call() -> None:
        counted[0] += 1
        sleeping.starting(5, 3000 if counted[0] % 20 == 0 else 30)()

    (found,) = time_latencies([call], Effort(1.0), CallWatch(sleeping))
    assert found.median_us == pytest.approx(35)
    assert found.percentile_us(99) == pytest.approx(3005)


def test_when_the_effort_is_over_each_route_is_called_once(sleeping: Queue) -> None:
    """On busy cores a bench of 5 s took over three minutes."""
    calls = [sleeping.starting(5, 30), sleeping.starting(5, 60)]
    found = time_latencies(calls, Effort(1.0, until=0.0), CallWatch(sleeping))
    assert [timing.samples for timing in found] == [1, 1]


def test_host_and_gpu_are_told_apart(sleeping: Queue) -> None:
    calls = [sleeping.starting(5, 300), sleeping.starting(300, 20)]
    hosts = host_us(calls, sleeping)
    assert hosts == pytest.approx([5, 300])
    works = [gpu_us(call, sleeping, host) for call, host in zip(calls, hosts, strict=True)]
    assert works == pytest.approx([300, 20])


def test_a_slow_phase_of_the_host_counts_for_no_route_alone(sleeping: Queue) -> None:
    """As it did for one that was timed while it lasted: 39 us for a call of 15."""
    counted = [0]

    def call_of(host_us: float) -> Callable[[], None]:
        def call() -> None:
            counted[0] += 1
            sleeping.starting(host_us * (3 if counted[0] < 150 else 1), 50)()

        return call

    assert host_us([call_of(15), call_of(5), call_of(100)], sleeping) == pytest.approx([15, 5, 100])


def test_caches_that_other_routes_left_cost_no_route(sleeping: Queue) -> None:
    last = [""]

    def call_of(name: str) -> Callable[[], None]:
        def call() -> None:
            sleeping.starting(10 if last[0] == name else 25, 50)()
            last[0] = name

        return call

    assert host_us([call_of("one"), call_of("other")], sleeping) == pytest.approx([10, 10])
