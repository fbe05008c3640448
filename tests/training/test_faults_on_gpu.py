"""What happens round training on a GPU: overflow, accumulation, threads, captures that break."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from plantune import LossScale, TrainStep, optimize
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.training.captured_step import UncapturedStep

from .on_gpu import assert_moved_alike, captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]


@pytest.fixture
def network(randomise):
    return randomise(SEResNet9Fixup(3, base_planes=16)).cuda()


def images(count=4, dtype=torch.float32):
    return torch.randn(count, 3, 64, 64, device="cuda", dtype=dtype)


def small():
    layers = (nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(8 * 31 * 31, 5)).cuda()


def gradients(module, x, wrt=()):
    found = [p for p in module.parameters() if p.requires_grad]
    return torch.autograd.grad(module(x).float().square().sum() / 8, [*found, *wrt])


def assert_near(ours, theirs):
    """As in tests/runtime/gpu/test_training.py: of other images or weights it is off by 1."""
    one, other = (torch.cat([g.flatten().float() for g in every]) for every in (ours, theirs))
    assert float((one - other).norm()) < 0.2 * float(other.norm())


def test_a_thousand_passes_with_other_images_and_weights(network):
    """In training each backward pass reads the weights and images of its forward pass."""
    network, x = network.half(), images(dtype=torch.float16)
    model = optimize(network, x, mode="train", fallback="error", share=True)
    parameters = list(network.parameters())
    for turn in range(1000):
        x.normal_()
        with torch.no_grad():  # no rounding undoes it, and nothing drifts
            parameters[turn % len(parameters)].neg_()
        if turn % 50 == 49:
            assert_near(gradients(model, x), gradients(network, x))
        else:
            model(x).float().square().sum().backward()
    assert model.stats().captures == 2


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_found_and_no_scale_needs_a_capture(network, bad):
    """With torch's scaler round passes from a plan."""
    model = optimize(network, images(2), mode="train", fallback="error", share=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for turn in range(12):
        x = images(2)
        if turn in (5, 6):
            x[1, 2, 3, 4] = bad
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        (found,) = scaler._found_inf_per_device(optimizer).values()
        assert bool(found) == (turn in (5, 6))
        scaler.step(optimizer)
        scaler.update()
        unmoved = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(unmoved) if turn in (5, 6) else not all(unmoved)
    assert scaler.get_scale() == 64 * 2**2 / 2**2 * 2**2
    assert model.stats().captures == 2


def test_frozen_weights_and_the_images_own_gradient(network):
    """And the gradient of the input on request."""
    network, x = network.half(), images(dtype=torch.float16)
    model = optimize(network, x, mode="train", fallback="error", share=True)
    for frozen in ((), ("layers.1", "stem"), ("layers", "stem"), ()):
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        x = torch.randn_like(x).requires_grad_()
        ours, theirs = (gradients(module, x, [x]) for module in (model, network))
        assert_near(ours[-1:], theirs[-1:])
        assert_near(ours, theirs)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_a_step_is_captured_beside_a_thread_that_uses_the_gpu():
    stop, errors = threading.Event(), []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    a = torch.ones(300, 300, device="cuda")
                    (a @ a).sum().item()
        except RuntimeError as error:
            errors.append(error)

    model = small()
    start, other = copy.deepcopy(model), copy.deepcopy(model)
    step = TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.01))
    theirs = torch.optim.SGD(other.parameters(), 0.01)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(4):
            # Each batch is freed as soon as its step is on its way.
            x, y = images(8), torch.randint(5, (8,), device="cuda")
            theirs.zero_grad()
            cross_entropy(other(x), y).backward()
            theirs.step()
            step(x, y)
            del x, y
            images(8).fill_(torch.nan)
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert captured(step) == 1
    assert_moved_alike(start, model, other)


def test_after_a_capture_that_failed_another_step_is_captured():
    """With the statistics of four batches and no more."""
    model = small()
    start, other = copy.deepcopy(model), copy.deepcopy(model)

    def waiting(outputs, target):
        return (
            cross_entropy(outputs, target) * float(target.numel() > 0)
            + float(outputs.detach().sum()) * 0
        )

    steps = [
        TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.01))
        for loss in (waiting, cross_entropy)
    ]
    theirs = torch.optim.SGD(other.parameters(), 0.01)
    batches = [(images(8), torch.randint(5, (8,), device="cuda")) for _ in range(4)]
    steps[0](*batches[0])
    with pytest.warns(UncapturedStep):
        steps[0](*batches[1])
    for x, y in batches[2:]:
        steps[1](x, y)
    for x, y in batches:
        theirs.zero_grad()
        cross_entropy(other(x), y).backward()
        theirs.step()
    assert [captured(step) for step in steps] == [0, 1]
    assert_moved_alike(start, model, other)


def test_images_in_16_bits_under_autocast_that_overflow(network):
    """A plan runs them, and a batch that is not finite is left out by the device."""
    scale = LossScale(2.0**8, growth_interval=100)
    step = TrainStep(
        network,
        lambda y, target: (y.float() - target).square().mean(),
        torch.optim.SGD(network.parameters(), 1e-3),
        scale=scale,
        autocast=torch.float16,
    )
    target = torch.randn(16, 128, 2, 2, device="cuda")
    for turn in range(6):
        x = images(16, torch.float16)
        if turn == 4:
            x[3, 1, 2, 0] = float("inf")
        before = [p.detach().clone() for p in network.parameters()]
        step(x, target)
        assert bool(step.found_inf) == (turn == 4)
        unmoved = all(map(torch.equal, before, network.parameters()))
        assert unmoved == (turn == 4)
    assert captured(step) == 1
    (tuned,) = step._models._made.values()
    assert (tuned.stats().eager, scale.state_dict()["scale"]) == (0, 2.0**7)


def test_the_callers_autocast_counts_as_it_is_in_each_call():
    """A captured step keeps no cast of a weight, and another one runs without autocast."""

    class Head(nn.Linear):
        def forward(self, y, target):
            return cross_entropy(super().forward(y).float(), target)

    model = nn.ModuleList([small(), Head(5, 5).cuda()])
    start, other = copy.deepcopy(model), copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.05) for m in (model, other))
    step = TrainStep(model[0], model[1], ours)
    for turn in range(12):
        x, y = images(8), torch.randint(5, (8,), device="cuda")
        theirs.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=turn // 3 % 2 > 0):
            step(x, y)
            loss = other[1](other[0](x), y)
        loss.backward()
        theirs.step()
    assert captured(step) == 2
    assert_moved_alike(start, model, other, 0.1)
