"""Wide parameters that are cast in each pass."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from plantune import LossScale, TrainStep, load_model, optimize
from plantune.models.computing import computing_in

LOW = torch.bfloat16


class Tied(nn.Module):
    """A weight that is used twice, and a norm with statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.second(self.norm(self.first(x)).relu())


@pytest.fixture
def x():
    return torch.randn(8, 6).to(LOW)


def narrow(module):
    """The same in 16 bits throughout, but for the norm."""
    made = copy.deepcopy(module).to(LOW)
    made.norm = copy.deepcopy(module.norm)
    return made


def test_it_computes_what_the_narrow_module_does(x):
    module = Tied()
    wanted = narrow(module)
    computing_in(module, LOW)
    y, other = module(x), wanted(x)
    assert torch.equal(y, other)
    y.sum().backward()
    other.sum().backward()
    for own, their in zip(module.parameters(), wanted.parameters(), strict=True):
        assert own.dtype == own.grad.dtype == torch.float32
        torch.testing.assert_close(own.grad, their.grad.float(), rtol=2e-2, atol=2e-2)
    assert module.first.weight is module.second.weight
    assert list(module.state_dict()) == list(wanted.state_dict())


@pytest.mark.parametrize("through", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_do_too(through, x):
    module = computing_in(Tied(), LOW).eval()
    other = through(module)
    assert torch.equal(other(x), module(x))
    assert {p.dtype for p in other.parameters()} == {torch.float32}


def test_an_error_inside_leaves_the_parameters(x):
    module = computing_in(Tied(), LOW)
    before = [*module.parameters()]
    with pytest.raises(RuntimeError):
        module(x[:, :3])
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))


def test_a_plan_casts_them_too(x):
    module = computing_in(Tied(), LOW)
    tuned, reference = optimize(module, x, mode="train"), copy.deepcopy(module)
    for model in (tuned, reference):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
    assert tuned.last_call().how == "planned"
    for own, their in zip(tuned.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, their, rtol=2e-2, atol=2e-2)


def test_a_known_network_in_a_training_step():
    """One set of parameters in float32; steps whose gradients overflow are left out."""
    model = load_model(
        "se_resnet9_fixup", batch=2, mode="train", dtype=LOW, parameters=torch.float32
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = TrainStep(
        model, lambda y, t: (y.float() - t).square().mean(), optimizer, scale=LossScale(8.0)
    )
    before = [p.detach().clone() for p in model.parameters()]
    images, target = torch.randn(2, 3, 64, 64).to(LOW), torch.randn(2, 512, 2, 2)
    values = [float(step(images, target)) for _ in range(3)]
    assert values[-1] < values[0]
    assert not any(map(torch.equal, before, model.parameters()))
    assert model.last_call().how == "planned"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
def test_on_a_gpu():
    layers = (nn.Conv2d(8, 16, 3, bias=False), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten())
    module = computing_in(nn.Sequential(*layers, nn.Linear(256, 10)).cuda(), torch.float16)
    module.to(memory_format=torch.channels_last)
    images = torch.randn(32, 8, 8, 8, device="cuda").half()
    tuned, reference = optimize(module, images, mode="train"), copy.deepcopy(module)
    for model in (tuned, reference):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(images).float().square().mean().backward()
            optimizer.step()
    assert tuned.last_call().how == "captured"
    start = dict(module.named_parameters())
    for (name, own), their in zip(tuned.named_parameters(), reference.parameters(), strict=True):
        assert own.dtype == own.grad.dtype == torch.float32
        way = (their - start[name]).norm()
        assert (own - their).norm() <= 2e-2 * way, name
