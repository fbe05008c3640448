"""Captured programs with graphs that are calls of this process."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from plantune.devices.cuda import capture
from plantune.devices.cuda.recording import Recording
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan
from plantune.runtime.captured import captured_program as captured
from plantune.runtime.captured import current_gpu, program_pool, recorder
from plantune.runtime.captured.captured_program import CapturedProgram
from plantune.runtime.module import UnplannedCall
from plantune.space.search_space import load_search_space

from ...fake_gpu import Stream, replace_torchs

CPU = torch.device("cpu")
SHAPE = (4, 3, 8, 8)


def replay_of(program, run):
    """Runs on the memory of the capture, as a graph does, whatever a program has there now."""
    values, graph = program._program.values, program.graph
    given = (*graph.inputs, *graph.output_gradients, *graph.parameters, *graph.buffers)
    sources = [name for name, _ in given if name in values]
    read = {name: values[name] for name in sources}
    written = {name: values[name] for name in graph.results if name in values}

    @torch.no_grad()  # a graph records nothing
    def replay():
        now = {name: values[name] for name in sources}
        values.update(read)
        run()
        for name, tensor in written.items():
            if values[name] is not tensor:
                tensor.copy_(values[name])
        values.update(now)

    return replay


def replace_in_torch(monkeypatch, name: str, fake: Callable[..., object]) -> None:
    """Replaces a function of torch's own library, also where a module of plantune keeps it.

    Only torch's CUDA build has these functions, and they refuse a device that is not a GPU.
    """
    real = getattr(torch._C, name, None)
    monkeypatch.setattr(torch._C, name, fake, raising=False)
    modules = [module for key, module in sys.modules.items() if key.startswith("plantune.")]
    for module in modules if real is not None else ():
        for kept in [key for key, value in vars(module).items() if value is real]:
            monkeypatch.setattr(module, kept, fake)


def is_capturing_now() -> bool:
    return torch.cuda.is_current_stream_capturing()


@pytest.fixture
def captures(monkeypatch):
    """What was captured so far; an error in `.failure` breaks the next capture after its pass, one
    in `.later` the one after that.
    """

    class Captures(list):
        failure: BaseException | None = None
        later: BaseException | None = None

    made = Captures()
    replace_torchs(monkeypatch)
    for name, value in {
        "_cuda_getCurrentRawStream": lambda index: Stream.current.cuda_stream,
        "_cuda_endAllocateToPool": lambda index, pool: None,
        "_cuda_releasePool": lambda index, pool: None,
    }.items():
        replace_in_torch(monkeypatch, name, value)
    monkeypatch.setattr(recorder, "stream_for", lambda owner, device: Stream())
    # The index of a CPU: no other GPU is current.
    for module in (current_gpu, program_pool):
        monkeypatch.setattr(module, "current_gpu", lambda: None)
    for module in (captured, program_pool):
        # Some tests replace torch's own later.
        monkeypatch.setattr(module, "is_capturing", is_capturing_now)

    def captured_pass(graph, run, device, pool):
        run()
        if made.failure is not None:
            raise made.failure
        made.failure, made.later = made.later, None
        made.append(run)
        return Recording(only=False)

    def captured_and_noted(self, name, run, *warm_up):
        found = make_pass(self, name, run, *warm_up)
        found.graph.graph.replay = replay_of(self, run)
        return found

    make_pass = CapturedProgram._captured
    monkeypatch.setattr(CapturedProgram, "_captured", captured_and_noted)
    monkeypatch.setattr(capture, "_captured", captured_pass)
    return made


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())


@pytest.fixture
def module():
    return Normed()


def program_of(module, train=False, frozen=False):
    module.train(train)
    graph = extract(module, TensorType(SHAPE), fold=False if train else None)
    if train:
        graph = differentiate(graph, [name for name, _ in module.named_parameters()])
    space = load_search_space("cpu")
    plan = framework_plan(graph, space, network="normed")
    program = CapturedProgram(check_plan(plan, graph, space), CPU, frozen=frozen)
    program.refresh(state_of(module))
    return program


def state_of(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@torch.no_grad()
def expected(module, x):
    return copy.deepcopy(module)(x)


@pytest.fixture
def x():
    return torch.randn(SHAPE)


@pytest.fixture
def captured_modules(captures, monkeypatch):
    """Tuned modules run from captured programs."""
    monkeypatch.setattr(program_pool, "program_on", captured_on)


def captured_on(device, checked, *, frozen=False):
    return CapturedProgram(checked, device, frozen=frozen)


@contextmanager
def suppressed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnplannedCall)
        yield
