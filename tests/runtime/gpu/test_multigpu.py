"""A module on a GPU that is not the current one."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from plantune import UnplannedCall, optimize
from plantune.devices.machine import arch_of
from plantune.errors import InputMismatch
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plans.guess import hand_plan
from plantune.space.search_space import load_search_space

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA GPUs"),
]
SECOND = torch.device("cuda", 1)


@pytest.fixture
def module(randomise):
    return randomise(SEResNet9Fixup(3, base_planes=16)).to(SECOND, torch.float16).eval()


@pytest.fixture
def images():
    return torch.randn(2, 3, 64, 64, device=SECOND, dtype=torch.float16)


def off(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@torch.no_grad()
def assert_right(model, module, x):
    exact = copy.deepcopy(module).double()(x.double())
    found = model(x)
    assert found.device == x.device
    assert torch.cuda.current_device() == 0
    assert off(found, exact) <= 2 * off(module(x), exact) + 8e-3


@pytest.mark.parametrize("plan", ["framework", "hand"])
def test_it_runs_on_its_own_gpu(module, images, plan):
    model = optimize(module, images)
    if plan == "hand":
        space = load_search_space(arch_of(SECOND))
        picked = hand_plan(model.pool().graph, space, network="by hand")
        model = optimize(module, images, plan=picked)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnplannedCall)
        for _ in range(20):
            images.normal_()
            assert_right(model, module, images)


def test_it_trains_there(module, images, assert_trains):
    model = optimize(module, images, mode="train")
    assert_trains(model, module, images)
    assert {parameter.grad.device for parameter in model.parameters()} == {SECOND}


def test_an_input_of_another_gpu_is_refused_by_name(module, images):
    model = optimize(module, images)
    with pytest.raises(InputMismatch, match=r"on cuda:1, got torch\.float16 on cuda:0"):
        model(images.to("cuda:0"))
    assert_right(model, module, images)


def test_moved_to_another_gpu_it_runs_through_the_framework(module, images):
    model = optimize(module, images)
    model(images)
    x = images.to("cuda:0")
    model.to("cuda:0")
    with pytest.warns(UnplannedCall, match=r"moved to torch\.float16 on cuda:0"):
        assert torch.equal(model(x), model.reference(x))


def test_where_a_capture_fails_the_current_gpu_stays(module, images, monkeypatch):
    model = optimize(module, images, fallback="silent")
    held = model.pool().lend()
    program = held.instance.program._program

    def broken():
        raise RuntimeError("no")

    monkeypatch.setattr(program, "run_forward", broken)
    held.release()
    with torch.no_grad():
        assert torch.equal(model(images), model.reference(images))
    assert torch.cuda.current_device() == 0
    assert_right(model, module, images)


@torch.no_grad()
def test_in_a_capture_of_its_own_gpu_while_another_is_the_current_one(module, images):
    model = optimize(module, images, fallback="error")
    model(images)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(SECOND)
    torch.cuda.synchronize(SECOND)
    with torch.cuda.graph(graph, stream=stream), torch.cuda.device(0):
        y = model(images)
    assert (y.device, torch.cuda.current_device()) == (SECOND, 0)
    images.normal_()
    kept = y
    for _ in range(3):
        with torch.cuda.device(SECOND):
            graph.replay()
        ordinary = model(images)
        torch.cuda.synchronize(SECOND)
        assert torch.equal(kept, ordinary)


@torch.no_grad()
def test_the_default_stream_of_each_gpu_is_its_own(module, images):
    """Its handle is 0 on each of them."""
    model = optimize(module, images, fallback="error")
    wanted = model(images)
    for current in (0, 1, 0):
        with torch.cuda.device(current):
            assert torch.equal(model(images), wanted)
            assert torch.cuda.current_device() == current
