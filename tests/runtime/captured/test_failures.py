"""A capture that breaks changes nothing, and the next one works."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.devices.cuda import capture
from plantune.errors import CaptureError
from plantune.runtime.captured.io_binding import IoBinding
from plantune.runtime.captured.recorder import Recorder
from plantune.runtime.module import UnplannedCall

from ...fake_gpu import Stream
from .conftest import expected, program_of, state_of

FAILURES = {
    "refused": (RuntimeError("operation not permitted when stream is capturing"), CaptureError),
    "no memory": (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
    "interrupt": (KeyboardInterrupt(), KeyboardInterrupt),
}


@pytest.mark.parametrize("which", ["failure", "later"], ids=["forward", "backward"])
@pytest.mark.parametrize("name", FAILURES)
def test_in_the_first_forward_of_training(module, x, captures, close, is_free, name, which):
    """Both passes are captured there, so that the framework can still run both."""
    failure, raised = FAILURES[name]
    program, stream = program_of(module, train=True), Stream.current
    before = {name: value.clone() for name, value in module.named_buffers()}
    setattr(captures, which, failure)
    with pytest.raises(raised):
        program.forward(x)
    assert Stream.current is stream
    for buffer, value in module.named_buffers():
        assert torch.equal(value, before[buffer]), buffer
    assert is_free(capture.one_capture)

    captures.failure = None
    other = copy.deepcopy(module)
    (y,) = program.forward(x)
    close(y, other(x))
    for (buffer, ours), theirs in zip(module.named_buffers(), other.buffers(), strict=True):
        close(ours, theirs)
        assert not torch.equal(ours, before[buffer])


@pytest.mark.usefixtures("captured_modules")
def test_a_module_without_room_for_its_backward_pass(module, x, captures, close):
    tuned = optimize(module.train(), x, mode="train")
    other = copy.deepcopy(module)
    captures.later = FAILURES["no memory"][0]
    with pytest.warns(UnplannedCall, match="out of memory"):
        y = tuned(x)
    wanted = other(x)
    close(y, wanted)
    y.sum().backward()
    wanted.sum().backward()
    for ours, theirs in zip(tuned.parameters(), other.parameters(), strict=True):
        close(ours.grad, theirs.grad)
    for ours, theirs in zip(tuned.buffers(), other.buffers(), strict=True):
        close(ours, theirs)


def test_with_other_weights(module, x, captures, close):
    program = program_of(module)
    with torch.no_grad():
        module[0].weight = nn.Parameter(module[0].weight * 2)
    program.refresh(state_of(module))
    captures.failure = RuntimeError("no")
    with pytest.raises(CaptureError, match="the forward pass: no"):
        program.forward(x)
    captures.failure = None
    (y,) = program.forward(x)
    close(y, expected(module, x))


@pytest.mark.usefixtures("captures")
def test_where_all_graphs_are_gone_they_get_other_memory(module, x, monkeypatch):
    first, graph = [], Recorder.graph

    def noted(self, run, **known):
        first.append(known["first"])
        return graph(self, run, **known)

    monkeypatch.setattr(Recorder, "graph", noted)
    program = program_of(module)
    program.forward(x)
    module[0].weight = nn.Parameter(torch.randn(8, 3, 3, 3))
    program.refresh(state_of(module))
    program.forward(x)
    assert first == [True, True]


def test_a_capture_after_a_broken_one_is_after_its_work(module, x, captures):
    program, stream = program_of(module), Stream.current
    captures.failure = RuntimeError("no")
    with pytest.raises(CaptureError):
        program.forward(x)
    assert stream.waited[-1] is program._recorder._side


def test_while_the_places_of_inputs_are_looked_for(module, x, captures, close, monkeypatch):
    """Half of them belong to this graph, the others to none that is left."""
    program = program_of(module)

    def fails(self, graph):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(IoBinding, "serve", fails)
        with pytest.raises(torch.OutOfMemoryError):
            program.forward(x)
    (y,) = program.forward(x)
    close(y, expected(module, x))
    assert len(captures) == 2


def test_no_other_thread_captures_while_one_warms_up(module, x, captures, is_free, monkeypatch):
    """To wait for the GPU, as each warm-up does, breaks a capture that is under way."""
    found = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: found.append(is_free(capture.one_capture)))
    program_of(module).forward(x)
    assert found == [False, False]
