"""Both passes of training, captured in the first forward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from .conftest import SHAPE, program_of


@pytest.mark.usefixtures("captures")
def test_training_follows_eager_from_the_first_pass(close):
    """Both passes are captured in it, and the backward pass may take the memory of outputs."""
    first, second = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3, bias=False)
    blocks = (first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.BatchNorm2d(8), nn.ReLU())
    module = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128, 5))
    other = copy.deepcopy(module)
    program = program_of(module, train=True)
    for _ in range(3):
        x, dy = torch.randn(SHAPE), torch.randn(4, 5)
        (y,) = program.forward(x)
        gradients = program.backward(dy)
        wanted = other(x)
        close(y, wanted)
        other.zero_grad()
        wanted.backward(dy)
        for name, parameter in other.named_parameters():
            close(gradients[name], parameter.grad)
    for ours, theirs in zip(module.buffers(), other.buffers(), strict=True):
        close(ours, theirs)


def test_passes_of_training_are_captured_once(module, x, captures):
    program = program_of(module, train=True)
    for _ in range(3):
        program.forward(x)
        program.backward(torch.ones(4, 8, 6, 6))
    assert len(captures) == 2


def test_in_a_capture_of_the_callers_nothing_is_captured(module, x, captures, monkeypatch):
    program = program_of(module, train=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    program.forward(x)
    assert not captures
