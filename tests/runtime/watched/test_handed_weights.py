"""Weights that torch's own tools write into a tuned module count, whatever strides they have."""

from __future__ import annotations

import copy
import threading
from functools import partial

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.plans.guess import COMPILED, hand_plan

FORMATS = {"rows": torch.contiguous_format, "channels_last": torch.channels_last}
OPTIMIZERS = {"AdamW": partial(torch.optim.AdamW, lr=0.05), "SGD": partial(torch.optim.SGD, lr=0.5)}
WAYS = ({"fused": True}, {"foreach": True}, {"foreach": False})


@pytest.fixture(autouse=True)
def _plans(monkeypatch):
    """Kernels that keep copies of weights."""
    by_hand = partial(hand_plan, without=COMPILED)
    monkeypatch.setattr("plantune.runtime.calls.choose.guessed_plan", by_hand)


@pytest.fixture(params=FORMATS)
def strides(request):
    return FORMATS[request.param]


@pytest.fixture
def module(strides):
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    return nn.Sequential(*layers).to(memory_format=strides)


@pytest.fixture
def x():
    return torch.randn(2, 3, 8, 8)


@pytest.fixture
def model(module, x):
    tuned = optimize(module, x, mode="train")
    with torch.no_grad():
        tuned(x)
    assert tuned.last_call().how == "planned"
    return tuned


def learned(network, optimizer, x):
    optimizer.zero_grad()
    network(x).square().mean().backward()
    optimizer.step()


def assert_alike(model, module, x, close):
    assert [p.stride() for p in model.parameters()] == [p.stride() for p in module.parameters()]
    with torch.no_grad():
        close(model(x), module(x))
    assert model.last_call().how == "planned"


@pytest.mark.parametrize("way", WAYS, ids=["fused", "foreach", "single"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_and_the_state_that_they_saved(kind, way, model, module, x, close):
    """The state comes from another process, so to speak: it is saved and loaded."""
    made = OPTIMIZERS[kind]
    ours, theirs = made(model.parameters(), **way), made(module.parameters(), **way)
    for _ in range(2):
        learned(model, ours, x)
        learned(module, theirs, x)
        assert_alike(model, module, x, close)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    learned(model, ours, x)
    learned(module, theirs, x)
    assert_alike(model, module, x, close)


def test_a_thread_that_was_waited_for(model, module, x, close):
    """As an update on another stream of a GPU: tests/runtime/gpu/test_live_weights.py."""

    def update():
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), -1.5)

    thread = threading.Thread(target=update)
    thread.start()
    thread.join()
    with torch.no_grad():
        torch._foreach_mul_(list(module.parameters()), -1.5)
    assert_alike(model, module, x, close)


@pytest.mark.parametrize("strides", [torch.contiguous_format])  # of others torch makes no vector
def test_one_vector_of_all(model, module, x, close):
    assert torch.equal(
        nn.utils.parameters_to_vector(model.parameters()),
        nn.utils.parameters_to_vector(module.parameters()),
    )
    vector = torch.randn(sum(p.numel() for p in module.parameters()))
    for each in (model, module):
        nn.utils.vector_to_parameters(vector, each.parameters())
    assert_alike(model, module, x, close)


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_state_of_other_strides(assign, model, module, x, close):
    other = nn.Sequential(*copy.deepcopy([*module])).to(memory_format=torch.contiguous_format)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-2)
    for each in (model, module):
        each.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert_alike(model, module, x, close)


def test_a_file_of_safetensors(model, module, x, close, tmp_path):
    torch_files = pytest.importorskip("safetensors.torch")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    contiguous = {k: v.contiguous() for k, v in module.state_dict().items()}
    torch_files.save_file(contiguous, tmp_path / "weights.safetensors")
    model.load_state_dict(torch_files.load_file(tmp_path / "weights.safetensors"))
    assert_alike(model, module, x, close)
