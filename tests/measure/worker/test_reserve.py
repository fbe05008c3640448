"""A worker in reserve: there when the one in use is lost, gone with it at the end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured, Rejected
from plantune.errors import WorkerDied
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.measure.timing import Effort
from plantune.measure.worker import work
from plantune.measure.worker.client import Limits, Worker
from plantune.measure.worker.reserve import Reserve
from plantune.measure.worker.work import request, warm_up
from plantune.space.arch import ARCH_NAMES
from plantune.space.search_space import load_search_space

FAMILIES = {"PLANTUNE_FAMILIES": "faulty_kernels", "PYTHONPATH": str(Path(__file__).parents[1])}
EFFORT = Effort(budget_s=0.03, warm_up_s=0.01, retries=20)


class FakeChild:
    """Starts at once; `asked` holds its requests."""

    def __init__(self) -> None:
        self.alive = True
        self.asked: list[object] = []

    def ask(self, request, limits_s):
        self.asked.append(request)
        return {}

    def end(self) -> None:
        self.alive = False


def test_the_child_is_warmed_up_and_taken_once():
    started = []

    def start():
        started.append(FakeChild())
        return started[-1]

    reserve = Reserve(start, "sm90")
    assert reserve.take() is None
    reserve.fill()
    reserve.fill()
    child = reserve.take()
    assert started == [child]
    assert child.asked == [request(warm_up, "sm90").message()]
    assert reserve.take() is None


def test_one_that_waits_for_the_reserve_finds_it_warmed_up():
    child = FakeChild()
    reserve = Reserve(lambda: child, "sm90")
    reserve.wait()
    reserve.fill()
    reserve.wait()
    assert child.asked


def test_warming_up_checks_and_times_small_candidates(monkeypatch):
    outcomes, real = {}, work.check_and_time

    def noted(say, step, *rest):
        outcomes[step.nodes[0].op] = outcome = real(say, step, *rest)
        return outcome

    monkeypatch.setattr(work, "check_and_time", noted)
    warm_up(lambda stage: None, "cpu")
    assert [*outcomes] == ["conv2d", "relu", "mean", "matmul"]
    assert not [o for o in outcomes.values() if isinstance(o, Rejected) and o.stage != "noisy"]


@pytest.mark.parametrize("arch", [name for name in ARCH_NAMES if name != "cpu"])
def test_every_arch_has_small_candidates(arch):
    steps = work.small_candidates(load_search_space(arch))
    types = {type_.dtype for step, _ in steps for type_ in step.types.values()}
    assert types == {"float16"}


def test_a_child_that_died_meanwhile_is_not_given():
    child = FakeChild()
    reserve = Reserve(lambda: child, "cpu")
    reserve.fill()
    while not child.asked:
        time.sleep(0.001)
    child.alive = False
    assert reserve.take() is None


def test_one_that_does_not_start_is_not_an_error():
    def fails():
        raise WorkerDied("no memory")

    reserve = Reserve(fails, "cpu")
    reserve.fill()
    assert reserve.take() is None
    reserve.close()


def test_closing_ends_it():
    child = FakeChild()
    reserve = Reserve(lambda: child, "cpu")
    reserve.fill()
    reserve.close()
    assert not child.alive


def test_a_lost_worker_is_replaced_at_once(step_of, copied_processes):
    relu = step_of(lambda b: b.emit("relu", b.input("x", TensorType((2, 3, 5, 7)))))

    def ask(worker, fault):
        return worker.check_and_time(relu, Candidate("faulty", Attrs(fault=fault)), "cpu", EFFORT)

    limits = Limits(build_s=10, run_s=10)
    with Worker(threads=1, limits=limits, environment=FAMILIES, reserve="cpu") as worker:
        first = worker.pid
        assert isinstance(ask(worker, "wrong"), Rejected)
        assert isinstance(ask(worker, "none"), Measured)
        assert worker.pid not in (first, None)
