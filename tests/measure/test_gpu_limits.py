"""Kernels that take more than a GPU has, differ from run to run, or outlive who asked for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured, Outcome, Rejected
from plantune.devices.gpus import best_arch
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.measure.timing import Effort
from plantune.measure.worker.client import Limits, Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EFFORT = Effort(budget_s=0.06, warm_up_s=0.01)
FAMILIES = {"PLANTUNE_FAMILIES": "faulty_gpu", "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}"}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(
        limits=Limits(run_s=20), environment=FAMILIES, reserve=best_arch()
    ) as worker:  # fmt: skip
        yield worker


@pytest.fixture
def ask(worker: Worker, step_of: Callable[..., Step]) -> Callable[[str], Outcome]:
    def run(fault: str) -> Outcome:
        x = TensorType((128, 64, 16, 16), "float16")
        step = step_of(lambda b: b.emit("relu", b.input("x", x)))
        candidate = Candidate("faulty_gpu", Attrs(fault=fault))
        return worker.check_and_time(step, candidate, best_arch(), EFFORT)

    return run


def is_good(outcome: Outcome) -> bool:
    return isinstance(outcome, Measured) and 0.5 < outcome.median_us < 200


FAULTS = {
    "memory": ("memory", "out of memory"),
    "workspace": ("memory", "out of memory"),
    "cluster": ("build", "cuLaunchKernelEx failed"),
    "shared_memory": ("build", "cuFuncSetAttribute failed"),
    "semaphore": ("numerics", "first run"),  # What an aborted run left is not zero.
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_kernel_is_rejected_and_the_next_one_measured(ask, fault):
    stage, reason = FAULTS[fault]
    outcome = ask(fault)
    assert isinstance(outcome, Rejected)
    assert (outcome.stage, reason in outcome.reason) == (stage, True), outcome
    assert is_good(ask("none"))


def test_a_kernel_that_differs_from_run_to_run_is_flagged(ask):
    outcome = ask("differs")
    assert is_good(outcome), outcome
    assert not outcome.deterministic
    assert ask("none").deterministic


PARENT = """
from plantune.devices.gpus import best_arch
from plantune.graph.builder import GraphBuilder
from plantune.graph.step import make_step
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.measure.worker.client import Worker
from plantune.base.canonical import Attrs
builder = GraphBuilder()
x = builder.input("x", TensorType((4, 64), "float16"))
graph = builder.build(builder.emit("relu", x))
with Worker(threads=1) as worker:
    step = make_step(graph, ["relu"])
    print(worker.pid, flush=True)
    worker.check_and_time(step, Candidate("faulty_gpu", Attrs(fault="endless")), best_arch())
"""


def test_an_endless_kernel_ends_with_the_process_that_asked_for_it(ask, eventually, is_gone):
    """Kill -9 of the search while the GPU is busy; the GPU is free again then."""
    command = [sys.executable, "-W", "ignore", "-c", PARENT]
    with subprocess.Popen(
        command, env={**os.environ, **FAMILIES}, stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        time.sleep(6)  # It starts, compiles and launches.
        assert not is_gone(pid)
        parent.kill()
        eventually(lambda: is_gone(pid), "the worker goes on")
    assert is_good(ask("none"))
