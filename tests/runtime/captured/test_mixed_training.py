"""Parameters in float32 with products in 16 bits, in the loops that people write."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from plantune import optimize

DTYPES = [torch.bfloat16, torch.float16]
LOOPS = {}


def loop(function):
    """`function` trains a model on images with a way to call it, and returns what is compared."""
    LOOPS[function.__name__.replace("_", " ")] = function
    return function


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


@loop
def two_backward_passes_add_up(model, call, x):
    for _ in range(2):
        call(x).square().mean().backward()
    return gradients(model)


@loop
def gradients_are_asked_for_twice(model, call, x):
    y = call(x)
    parameters = [*model.parameters()]
    first = torch.autograd.grad(y.square().mean(), parameters, retain_graph=True)
    second = torch.autograd.grad(y.sum(), parameters)
    return [*first, *second]


@loop
def gradients_that_are_kept_stay(model, call, x):
    call(x).square().mean().backward()
    kept = gradients(model)
    model.zero_grad(set_to_none=True)
    call(3 * x).square().mean().backward()
    return kept


@loop
def the_input_gets_a_gradient_on_request(model, call, x):
    x = x.clone().requires_grad_()
    call(x).square().mean().backward()
    return [x.grad, *gradients(model)]


@loop
def hooks_of_parameters_and_outputs_are_called(model, call, x):
    seen, first = [], next(model.parameters())
    handle = first.register_hook(lambda gradient: 2 * gradient)
    first.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    y = call(x)
    y.register_hook(lambda gradient: 3 * gradient)
    y.square().mean().backward()
    handle.remove()
    return [*seen, *gradients(model)]


@loop
def a_scaler_leaves_out_an_overflow_and_clips(model, call, x):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler(x.device.type, init_scale=8.0, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        loss = call(x).square().mean() * (float("inf") if step == 2 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 16.0, 8.0, 8.0, 16.0]
    return [*model.parameters()]


@loop
def a_step_between_the_passes_counts(model, call, x):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        call(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            evaluated = call(x)
    return [evaluated, *model.parameters()]


@pytest.fixture
def module(randomise):
    """No bias before a norm, whose gradient would be nothing but rounding."""
    layers = (nn.Conv2d(3, 8, 3, bias=False), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    return randomise(nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 5))).train()


def near(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert [y.dtype for y in found] == [y.dtype for y in wanted]
    for own, their in zip(found, wanted, strict=True):
        assert (own - their).float().norm() <= 2e-2 * their.float().norm()


@pytest.mark.usefixtures("captured_modules")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("train", LOOPS.values(), ids=LOOPS)
def test_it_is_as_with_eager(train, dtype, module):
    follows_eager(train, dtype, module, torch.randn(4, 3, 8, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("train", LOOPS.values(), ids=LOOPS)
def test_on_a_gpu(train, dtype, module):
    follows_eager(train, dtype, module.cuda(), torch.randn(4, 3, 8, 8, device="cuda"))


def follows_eager(train, dtype, module, x):
    model, reference = optimize(module, x, mode="train"), copy.deepcopy(module)
    found = []
    for each in (model, reference):

        def call(images, each=each):
            with torch.autocast(x.device.type, dtype):
                return each(images).float()

        found.append([y.detach() for y in train(each, call, x)])
    near(*found)
    assert model.stats().eager == 0
