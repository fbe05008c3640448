"""Both passes of training, captured in the first forward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.runtime.captured.rehearsal import rehearsing

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


def gradients_of(program, x):
    (y,) = program.forward(x)
    return program.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))


@pytest.fixture
def plain():
    """No bias before the batch norm: its gradient would be nothing but rounding."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())


@pytest.mark.usefixtures("captures")
class TestMemoryOfGradients:
    def test_no_replay_writes_into_gradients_that_a_caller_holds(self, plain, x):
        program = program_of(plain, train=True)
        first = gradients_of(program, x)
        kept = {name: gradient.clone() for name, gradient in first.items()}
        second = gradients_of(program, 2 * x)
        for name, gradient in first.items():
            assert torch.equal(gradient, kept[name])
            assert gradient.data_ptr() != second[name].data_ptr()

    def test_they_have_the_strides_of_their_parameters(self, plain, x, close):
        eager = copy.deepcopy(plain.to(memory_format=torch.channels_last))
        found = gradients_of(program_of(plain, train=True), x)
        y = eager(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
        for name, parameter in eager.named_parameters():
            assert found[name].stride() == parameter.stride()
            close(found[name], parameter.grad)

    def test_they_are_one_piece_of_memory(self, plain, x):
        found = gradients_of(program_of(plain, train=True), x)
        assert len({gradient.untyped_storage().data_ptr() for gradient in found.values()}) == 1


@pytest.mark.usefixtures("captured_modules")
class TestGradientsOfModules:
    @pytest.fixture
    def model(self, plain, x):
        return optimize(plain, x, mode="train")

    def test_autograd_takes_them_over_without_a_copy(self, model, x):
        model(x).sum().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1

    def test_two_backward_passes_add_up_as_in_eager(self, model, plain, x, close):
        for _ in range(2):
            model(x).square().sum().backward()
            plain(x).square().sum().backward()
        model(2 * x).square().sum().backward()
        plain(2 * x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            close(ours.grad, theirs.grad)

    def test_results_of_autograd_grad_stay(self, model, x):
        def grads(images):
            return torch.autograd.grad(model(images).square().sum(), [*model.parameters()])

        first = grads(x)
        kept = [grad.clone() for grad in first]
        grads(3 * x)
        assert all(map(torch.equal, first, kept))

    def test_a_gradient_that_is_kept_over_zero_grad_stays(self, model, x):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).square().sum().backward()
        held = next(model.parameters()).grad
        kept = held.clone()
        optimizer.zero_grad(set_to_none=True)
        model(3 * x).square().sum().backward()
        assert torch.equal(held, kept)

    def test_in_a_rehearsal_nothing_is_replayed(self, model, plain, x, close, captures):
        with rehearsing():
            model(x).square().sum().backward()
        assert not captures
        plain(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            close(ours.grad, theirs.grad)
        model(x).square().sum().backward()
        assert len(captures) == 2
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            close(ours.grad, 2 * theirs.grad)
