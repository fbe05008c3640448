"""Processes that time on one GPU take turns."""

from __future__ import annotations

import fcntl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured
from plantune.graph.builder import GraphBuilder
from plantune.graph.partition import one_by_one
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.measure.timing import Effort
from plantune.measure.worker.client import Limits, Worker
from plantune.measure.worker.turns import GPU, Turn, turn


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANTUNE_TURNS", str(tmp_path / "turns"))
    return tmp_path / f"turns{GPU}"


def is_held(file: Path) -> bool:
    with file.open("w") as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_turn_is_held_until_its_end(file: Path) -> None:
    mine = Turn()
    mine.begin()
    mine.begin()
    assert is_held(file)
    mine.end()
    assert not is_held(file)
    with turn(), turn():
        assert is_held(file)
    assert not is_held(file)


def test_who_waits_comes_before_who_asks_again(file: Path) -> None:
    """Also if the latter asks at once, as a compiler does that times one kernel after the other."""
    order, first, second = list[str](), Turn(), Turn()
    first.begin()

    def wait() -> None:
        second.begin()
        order.append("second")
        second.end()

    waiting = threading.Thread(target=wait)
    waiting.start()
    queue = file.with_name("turns.queue")
    while not is_held(queue):
        assert waiting.is_alive()
    first.end()
    first.begin()
    order.append("first")
    first.end()
    waiting.join()
    assert order == ["second", "first"]


def test_nobody_waits_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLANTUNE_TURNS", raising=False)
    one, other = Turn(), Turn()
    one.begin()
    other.begin()


@pytest.mark.usefixtures("copied_processes")
def test_a_worker_waits_for_its_turn_after_building(file: Path) -> None:
    """And gives the turn back with its answer."""
    builder = GraphBuilder()
    x = builder.input("x", TensorType((2, 8)))
    graph = builder.build(builder.emit("relu", x))
    (step,) = one_by_one(graph)
    with Worker(threads=1, limits=Limits(build_s=60, run_s=30)) as worker:
        stages = list[str]()
        worker.on_stage = stages.append
        mine = Turn()
        mine.begin()
        asked = (step, Candidate("framework", Attrs(layout="nchw")), "cpu", Effort(0.01, 0.0))
        with ThreadPoolExecutor(1) as pool:
            outcome = pool.submit(worker.check_and_time, *asked)
            while not is_held(file.with_name("turns.queue")) or not stages:
                assert not outcome.done()
            assert stages == ["build"]
            mine.end()
            assert isinstance(outcome.result(), Measured)
        assert "time" in stages
        assert not is_held(file)
