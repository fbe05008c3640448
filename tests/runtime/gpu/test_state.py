"""On a GPU, too, a plan follows what a module is made of, and says how it ran."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from plantune import check, optimize

pytestmark = pytest.mark.gpu


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self._gain = [1.0]

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x)))
        return {"y": y * self._gain[0], "sum": (y.mean((2, 3)),)}


@pytest.fixture(params=["infer", "train"])
def mode(request):
    return request.param


@pytest.fixture
def model(mode, images):
    module = Gated().cuda().half().train(mode == "train")
    model = optimize(module, images, mode=mode)
    with torch.no_grad():
        model(images)
    assert model.last_call().how == "captured"
    return model


@torch.no_grad()
def assert_same(model, x, off):
    other = copy.deepcopy(model.reference)
    found, wanted = model(x), other(x)
    assert type(found["sum"]) is tuple
    assert off(found["y"], wanted["y"]) < 4e-3
    assert off(found["sum"][0], wanted["sum"][0]) < 4e-3
    for ours, theirs in zip(model.buffers(), other.buffers(), strict=True):
        assert off(ours, theirs) < 4e-3


def test_settings_and_modes(model, images, off):
    assert_same(model, images, off)
    model._gain[0] = 3.0
    assert_same(model, images, off)
    model.conv.padding = (1, 1)
    assert_same(model, images, off)
    model.norm.train(not model.norm.training)
    assert_same(model, images, off)
    assert model.last_call().how == "captured"
    check(model, images)


@torch.no_grad()
def test_a_weight_with_other_strides_in_the_same_memory(model, images, off):
    weight = model.conv.weight
    weight.data = weight.data.as_strided(weight.shape, (27, 1, 9, 3))
    model.refresh()
    assert_same(model, images, off)


def test_transforms_get_the_modules_own_operations(model, images, off):
    other = copy.deepcopy(model.reference).eval()
    model.eval()
    wanted, found = (grad(lambda x, m=m: m(x)["y"].sum())(images) for m in (other, model))
    assert wanted.any()
    assert off(found, wanted) < 4e-3
    wanted, found = (vmap(m)(images[None])["y"] for m in (other, model))
    assert off(found, wanted) < 4e-3


def test_training_passes_that_wait_are_bounded(images):
    model = optimize(Gated().cuda().half().train(), images, mode="train", fallback="silent")
    losses = [model(images)["y"].sum() for _ in range(20)]
    assert model.stats().instances == 8
    torch.stack(losses).sum().backward()
    memory = torch.cuda.memory_allocated()
    for _ in range(3):
        torch.stack([model(images)["y"].sum() for _ in range(20)]).sum().backward()
    assert model.stats().instances == 8
    assert torch.cuda.memory_allocated() <= memory + (1 << 20)
