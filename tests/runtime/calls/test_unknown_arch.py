"""On a GPU whose arch plantune does not know, the framework runs, with one warning."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch
from torch import nn

from plantune import load_model, optimize
from plantune.errors import InputMismatch, UnsupportedDevice
from plantune.runtime.calls import calls
from plantune.runtime.module import UnplannedCall

# Blackwell's and Ampere's relatives, a chip that is too old, and one of the years to come.
CAPABILITIES = [(10, 3), (8, 7), (12, 1), (6, 1), (14, 0)]


@pytest.fixture(params=CAPABILITIES, ids=str)
def arch(request, monkeypatch):
    """As if torch saw such a GPU, and the tensors of this test lay on it."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: request.param)
    monkeypatch.setattr(nn.Module, "to", lambda self, *_, **named: self)
    monkeypatch.setattr(calls, "device_of", lambda module, otherwise=gpu: gpu)
    return "sm{}{}".format(*request.param)


def said(model, x):
    """What calls give, and what they warn of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ys = [model(x) for _ in range(3)]
    return ys, [(item.category, str(item.message)) for item in caught]


def test_optimize_gives_the_framework_and_one_warning(arch):
    module, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(2, 3, 8, 8)
    ys, ((kind, text),) = said(optimize(module, x), x)
    assert all(torch.equal(y, module(x)) for y in ys)
    assert kind is UnplannedCall
    assert f"cuda:0 is {arch}; plantune knows cpu, sm70" in text
    assert "the framework runs it instead" in text


def test_load_model_does_so_too(arch):
    model, x = load_model("se_resnet9_fixup", batch=1), torch.randn(1, 3, 64, 64)
    ys, ((kind, text),) = said(model, x)
    assert all(torch.equal(y, model.reference(x)) for y in ys)
    assert kind is UnplannedCall
    assert arch in text


def test_training_works(arch):
    module, x = nn.Conv2d(3, 8, 3), torch.randn(2, 3, 8, 8)
    model = optimize(module, x, mode="train", fallback="silent")
    model(x).sum().backward()
    assert model.weight.grad.any()


def test_it_is_an_error_where_that_is_asked_for(arch):
    x = torch.randn(2, 3, 8, 8)
    model = optimize(nn.Conv2d(3, 8, 3).eval(), x, fallback="error")
    with pytest.raises(InputMismatch, match=f"cuda:0 is {arch}"):
        model(x)


def test_there_is_no_plan_to_ask_for(arch):
    with pytest.raises(UnsupportedDevice, match=arch):
        _ = optimize(nn.Conv2d(3, 8, 3).eval(), torch.randn(2, 3, 8, 8)).plan


@pytest.mark.usefixtures("arch")
def test_a_copy_for_another_machine_looks_at_that_one(monkeypatch):
    x = torch.randn(2, 3, 8, 8)
    made = pickle.dumps(optimize(nn.Conv2d(3, 8, 3).eval(), x, fallback="error"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert pickle.loads(made)._calls._table.why_no_plans is None
