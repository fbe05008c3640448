"""Mixed precision round the tuned module."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from plantune import optimize
from plantune.errors import InputMismatch


def autocast(dtype=torch.bfloat16, **options):
    return torch.autocast("cpu", dtype, **options)


@pytest.fixture
def model(small, images):
    return optimize(small, images, mode="train", fallback="silent")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_near_as_eagers(dtype, model, small, images):
    model(images)
    found = []
    for module in (model, small):
        with autocast(dtype):
            y = module(images)
        y.float().square().mean().backward()
        found.append([y.detach(), *(p.grad for p in module.parameters())])
    assert found[1][0].dtype != torch.float64
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= 0.05 * theirs.norm()


def test_autocast_is_not_the_plans_precision(model, small, images):
    plain = model(images)
    with autocast():
        rounded = model(images)
    assert not torch.allclose(plain, rounded, rtol=1e-5, atol=1e-5)


def test_an_input_of_the_lower_dtype_is_what_autocast_is_for(model, small, images):
    with autocast():
        assert torch.equal(model(images.bfloat16()), small(images.bfloat16()))
    with pytest.raises(InputMismatch, match="bfloat16"):
        model(images.bfloat16())


def test_the_plan_is_back_after_it(small, images, close):
    model = optimize(small, images)
    with autocast():
        model(images)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with autocast(enabled=False):
            close(model(images), small(images))
        with autocast(), autocast(enabled=False):
            close(model(images), small(images))
        close(model(images), small(images))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_reaches_the_gradients(bad, plan, small, images, tuned):
    model = tuned(small, images, "train", plan)
    found = []
    for module in (model, small):
        y = module(images)
        seed = torch.ones_like(y)
        seed[0, 0] = bad
        y.backward(seed)
        found.append([p.grad for p in module.parameters()])
    assert not any(bool(g.isfinite().all()) for g in found[0][:1])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())


def test_gradient_scaling_skips_the_overflow_and_then_learns(plan, small, images, tuned, close):
    """A scale that overflows fp32 is found, no weight moves, and a smaller one is taken."""
    model = tuned(small, images, "train", plan)
    pair = [(copy.deepcopy(small), 0), (model, 1)]
    state = []
    for module, _ in pair:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        before = [p.detach().clone() for p in module.parameters()]
        scales = []
        for _ in range(40):
            optimizer.zero_grad()
            scaler.scale(module(images).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            if len(scales) == 1:
                assert all(map(torch.equal, before, module.parameters())), "skipped"
        assert scales[0] < 2.0**127
        assert scales[-1] == scales[-2]
        assert not any(map(torch.equal, before, module.parameters()))
        state.append((scales, list(module.parameters())))
    assert state[0][0] == state[1][0]
    for ours, theirs in zip(state[1][1], state[0][1], strict=True):
        close(ours, theirs)
