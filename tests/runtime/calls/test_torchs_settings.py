"""Settings of torch around a call do what they do to eager; test_deterministic.py has one more."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.runtime.calls import call_table
from plantune.runtime.calls.choose import Finder
from plantune.runtime.calls.planned import heeds_torch_settings


def setting(get, set_, value):
    """A context in which a global setting of torch has this value."""

    @contextmanager
    def within():
        before = get()
        set_(value)
        try:
            yield
        finally:
            set_(before)

    return within


@pytest.fixture
def _given_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_given_threads")
def test_a_setting_that_changes_while_a_plan_is_made(module, x, monkeypatch, close):
    """Another thread's doing: what was made serves no later call."""
    made = Finder.pool
    pools = []

    def pool(finder):
        pools.append(made(finder))
        torch.set_num_threads(3 if len(pools) == 1 else 2)
        return pools[-1]

    monkeypatch.setattr(Finder, "pool", pool)
    torch.set_num_threads(2)
    model, eager = optimize(module.eval(), x), copy.deepcopy(module)
    with torch.no_grad():
        close(model(x), eager(x))
        torch.set_num_threads(2)
        assert model.stats().instances == 0
        for _ in range(2):
            close(model(x), eager(x))
    assert len(pools) == 2


@pytest.mark.parametrize(("dtype", "asked"), [(torch.float16, 0), (torch.float32, 3)])
def test_precisions_are_asked_for_where_a_plan_depends_on_them(
    dtype, asked, named, monkeypatch, close
):
    """As on a GPU: of float32 alone. What they are in a call counts then."""
    now, asks = ["tf32"], []

    def torch_settings_of(device):
        return lambda: asks.append(now[0]) or (now[0],)

    monkeypatch.setattr(call_table, "torch_settings_of", torch_settings_of)
    on_gpu = torch.device("cuda")
    monkeypatch.setattr(
        call_table, "heeds_torch_settings", lambda graph, _: heeds_torch_settings(graph, on_gpu)
    )
    module = named(flat=nn.Flatten(), out=nn.Linear(12, 2)).to(dtype).eval()
    x = torch.randn(2, 3, 4, dtype=dtype)
    model = optimize(module, x)
    with torch.no_grad():
        model(x)
        asks.clear()
        for _ in range(3):
            close(model(x), module(x))
        assert len(asks) == asked
        made, now[0] = model.stats().instances, "ieee"
        close(model(x), module(x))
    assert model.stats().instances == made + bool(asked)


SETTINGS = {
    "default dtype float64": setting(
        torch.get_default_dtype, torch.set_default_dtype, torch.float64
    ),
    "default device meta": lambda: torch.device("meta"),
    "one thread": setting(torch.get_num_threads, torch.set_num_threads, 1),
    "three threads": setting(torch.get_num_threads, torch.set_num_threads, 3),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "gradients": torch.enable_grad,
}


@pytest.fixture
def module(named):
    layers = {"conv": nn.Conv2d(3, 8, 3, bias=False), "norm": nn.BatchNorm2d(8), "relu": nn.ReLU()}
    return named(**layers, head=nn.Conv2d(8, 4, 1))


@pytest.fixture
def x():
    return torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("name", SETTINGS)
def test_calls_under_a_setting_and_after_it(name, mode, module, x, tuned, close):
    model = tuned(module, x, mode, "hand")
    eager = copy.deepcopy(model.reference)
    for around in (SETTINGS[name], torch.no_grad, SETTINGS[name], torch.enable_grad):
        with around():
            found, wanted = model(x), eager(x)
        close(found, wanted)
        assert (found.device, found.dtype) == (wanted.device, wanted.dtype)
        assert model.last_call().how == "planned"
    for ours, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        close(ours.double(), theirs.double())


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_under_a_setting(name, module, x, tuned, close):
    model = tuned(module, x, "train", "hand")
    eager = copy.deepcopy(model.reference)
    with SETTINGS[name](), torch.inference_mode(False), torch.enable_grad():
        for network in (model, eager):
            network(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        close(ours.grad, theirs.grad)


class OfNumbers(nn.Module):
    """Makes tensors of Python's numbers, and floats of integers."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        return self.head(x) * torch.ones(6), (x > 0).sum(1) / 3, x.long().exp()


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_the_default_dtype_changes_between_calls(mode, tuned, close):
    x = torch.randn(4, 6)
    model = tuned(OfNumbers(), x, mode, "default")
    eager = copy.deepcopy(model.reference)
    with torch.no_grad():
        for around in (nullcontext, SETTINGS["default dtype float64"]) * 2:
            with around():
                found, wanted = model(x), eager(x)
            for ours, theirs in zip(found, wanted, strict=True):
                close(ours, theirs)
                assert ours.dtype == theirs.dtype
            assert model.last_call().how == "planned"
    assert model.stats().instances == 2
