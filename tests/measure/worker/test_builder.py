"""The process that builds for the measuring one: what fails in it, and when it stands still."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from plantune.base.canonical import Attrs
from plantune.errors import BuildError, WorkerDied
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.measure.worker.builder import Builder
from plantune.measure.worker.client import Worker

HERE = Path(__file__).parents[1]
FAMILIES = {"PLANTUNE_FAMILIES": "faulty_kernels", "PYTHONPATH": str(HERE)}


@pytest.fixture
def relu(step_of):
    return step_of(lambda b: b.emit("relu", b.input("x", TensorType((2, 3, 5, 7)))))


@pytest.fixture(scope="module")
def builder():
    builder = Builder(Worker(threads=1, environment=FAMILIES))
    yield builder
    builder.close()


def faulty(fault: str) -> Candidate:
    return Candidate("faulty", Attrs(fault=fault))


def state_of(builder: Builder) -> str:
    """R, S or T for stopped, as Linux says."""
    stat = Path(f"/proc/{builder._child.pid}/stat").read_text(encoding="ascii")
    return stat.rpartition(")")[2].split()[0]


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_build_that_fails_says_why_and_the_process_goes_on(builder, relu):
    builder.build(relu, faulty("none"), "cpu")
    pid = builder._child.pid
    with pytest.raises(BuildError, match="did not compile it"):
        builder.build(relu, faulty("build_error"), "cpu")
    assert builder._child.pid == pid


def test_a_process_that_died_is_replaced(builder, relu):
    builder.build(relu, faulty("none"), "cpu")
    child = builder._child
    child.kill()
    until(lambda: not child.alive)
    builder.build(relu, faulty("none"), "cpu")
    assert builder._child.alive


def test_it_stands_still_when_it_is_told(builder, relu):
    builder.build(relu, faulty("none"), "cpu")
    builder.pause(True)
    until(lambda: state_of(builder) == "T")
    built = threading.Thread(target=builder.build, args=(relu, faulty("none"), "cpu"), daemon=True)
    built.start()
    builder.pause(False)
    built.join(60)
    assert not built.is_alive()


def test_closing_ends_what_is_being_built_even_where_it_stands_still(builder, relu):
    builder.build(relu, faulty("none"), "cpu")
    builder.pause(True)
    child, raised = builder._child, []

    def build():
        try:
            builder.build(relu, faulty("none"), "cpu")
        except WorkerDied as error:
            raised.append(error)

    thread = threading.Thread(target=build, daemon=True)
    thread.start()
    time.sleep(0.05)
    builder.close()
    thread.join(60)
    assert raised
    until(lambda: not child.alive)
