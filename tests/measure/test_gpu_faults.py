"""Kernels that misbehave on a real GPU: each is rejected for its reason, the next is measured."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured, Outcome, Rejected
from plantune.devices.gpus import best_arch, device_for
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.measure.numerics import check
from plantune.measure.timing import Effort
from plantune.measure.worker.client import Limits, Worker
from plantune.space.search_space import load_search_space

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]
HERE = Path(__file__).parent
EFFORT = Effort(budget_s=0.06, warm_up_s=0.01)
IMAGES = TensorType((128, 64, 16, 16), "float16")
# Large enough that no kernel can be as fast as one that does nothing.
MANY_IMAGES = TensorType((2048, 64, 32, 32), "float16")


@pytest.fixture(scope="module")
def arch() -> str:
    return best_arch()


@pytest.fixture(scope="module")
def worker(arch: str) -> Iterator[Worker]:
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    families = {"PLANTUNE_FAMILIES": "faulty_cuda", "PYTHONPATH": path}
    limits = Limits(run_s=20)
    with Worker(limits=limits, environment=families, reserve=arch) as worker:
        yield worker


@pytest.fixture
def ask(worker: Worker, arch: str, step_of: Callable[..., Step]) -> Callable[..., Outcome]:
    def run(fault: str, type_: TensorType = IMAGES) -> Outcome:
        step = step_of(lambda b: b.emit("relu", b.input("x", type_)))
        candidate = Candidate("faulty_cuda", Attrs(fault=fault))
        return worker.check_and_time(step, candidate, arch, EFFORT)

    return run


def is_good(outcome: Outcome, type_: TensorType = IMAGES) -> bool:
    """Measured, and as long as it takes to move so much: at 42 GB/s to 17 TB/s."""
    times = type_.numel / IMAGES.numel
    return isinstance(outcome, Measured) and 0.5 * times < outcome.median_us < 200 * times


FAULTS = {
    "build_error": ("build", "expected a declaration"),
    "too_many_threads": ("build", "cuLaunchKernelEx failed with 1"),
    "trap": ("crash", "CUDA error"),
    "illegal_address": ("crash", "an illegal memory access"),
    "misaligned": ("crash", "misaligned address"),
    "endless": ("timeout", "check took over 20 s"),
    "wrong": ("numerics", "relative error 0.02"),
    "loses_nan": ("numerics", "NaN or infinity is lost"),
    "unwritten": ("numerics", "is nan instead of"),
    "outside": ("numerics", "wrote outside of 'relu'"),
    "writes_input": ("numerics", "wrote to its input 'x'"),
    "ignores_stream": ("numerics", "is (nan|0) instead of"),
    "synchronizes": ("numerics", "no graph can be captured"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_kernel_is_rejected_and_the_next_one_measured(ask, fault):
    stage, reason = FAULTS[fault]
    outcome = ask(fault)
    assert isinstance(outcome, Rejected)
    assert outcome.stage == stage
    assert re.search(reason, outcome.reason)
    assert is_good(ask("none"))


def test_a_kernel_that_is_too_fast_is_rejected(ask):
    """In the graph that is timed it does nothing."""
    outcome = ask("idle", MANY_IMAGES)
    assert isinstance(outcome, Rejected)
    assert outcome.stage == "roofline"
    assert is_good(ask("none", MANY_IMAGES), MANY_IMAGES)


def test_the_parents_cuda_still_works(ask):
    ones = torch.ones(64, device="cuda")
    assert isinstance(ask("illegal_address"), Rejected)
    assert float(ones.sum()) == 64


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_frameworks_convolution_is_right(step_of, arch, layout, dtype):
    def emit(b):
        x = b.input("x", TensorType((7, 5, 13, 13), dtype))
        w = b.parameter("w", TensorType((9, 5, 3, 3), dtype))
        return b.emit("conv2d", x, w, stride=(2, 2), padding=(1, 1), dilation=(1, 1), groups=1)

    space = load_search_space(arch)
    report = check(step_of(emit), Candidate("framework", Attrs(layout=layout)), space)
    assert 0 < report.error <= report.bound


def test_large_steps_are_compared_with_fp32(step_of, arch):
    def emit(b):
        x = b.input("x", TensorType((2048, 128, 16, 16), "float16"))
        w = b.parameter("w", TensorType((128, 128, 3, 3), "float16"))
        return b.emit("conv2d", x, w, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)

    space = load_search_space(arch)
    report = check(step_of(emit), Candidate("framework", Attrs(layout="nhwc")), space)
    assert 0 < report.error <= report.bound < 5e-3


def test_a_graph_repeats_its_work(arch):
    device = device_for(load_search_space(arch).arch)
    with device.own_stream():
        counter = torch.zeros(1, device=device.place)
        replay = device.captured(lambda: counter.add_(1))
        for _ in range(3):
            replay()
        device.synchronize()
        assert int(counter) == 3
