"""Training steps on a GPU are replays, and compute what eager does."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from plantune import LossScale, TrainStep
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.training.capturable_update import CapturableUpdate
from plantune.training.captured_step import UncapturedStep
from plantune.training.device_update import DeviceUpdate
from plantune.training.update import TorchUpdate

from .on_gpu import OPTIMIZERS, assert_moved_alike, captured, linear, random_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]
CAPTURABLE = {
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5, capturable=True),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2, capturable=True),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2, capturable=True),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2, capturable=True),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2, capturable=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.9, capturable=True),
    "my adam": lambda p: type("Mine", (torch.optim.Adam,), {})(p, 1e-2, capturable=True),
}


@pytest.fixture
def batches():
    return random_batches()


@contextmanager
def strict():
    """Warnings are errors, but for what torch says of the first product in a thread of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS")
        yield


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernels_step_as_torch_does_under_a_schedule_that_moves_every_number(name, batches):
    model = linear()
    start, other = copy.deepcopy(model), copy.deepcopy(model)
    pairs = []
    for module in (model, other):
        optimizer = OPTIMIZERS[name](module.parameters())
        moves = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.02, total_steps=25, cycle_momentum=moves and name != "sgd"
        )
        pairs.append((optimizer, scheduler))
    (ours, mine), (theirs, their) = pairs
    step = TrainStep(model, cross_entropy, ours, max_norm=0.5)
    assert isinstance(step._update, DeviceUpdate)
    with strict():
        for x, y in batches:
            value = step(x, y)
            mine.step()
            theirs.zero_grad()
            wanted = cross_entropy(other(x), y)
            wanted.backward()
            norm = nn.utils.clip_grad_norm_(other.parameters(), 0.5)
            theirs.step()
            their.step()
            torch.testing.assert_close(value, wanted.detach(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(step.gradient_norm, norm, rtol=1e-4, atol=1e-5)
    assert captured(step) == 1
    assert_moved_alike(start, model, other)
    for state, wanted in zip(ours.state.values(), theirs.state.values(), strict=True):
        for key, value in wanted.items():
            off = float((state[key].double().cpu() - value.double().cpu()).norm())
            assert off <= 1e-2 * float(value.double().norm()), key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_in_16_bits(dtype, batches):
    model = linear().to(dtype)
    start, other = copy.deepcopy(model), copy.deepcopy(model)
    step = TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    theirs = torch.optim.SGD(other.parameters(), 0.1, 0.9)
    for x, y in batches[:6]:
        step(x.to(dtype), y)
        theirs.zero_grad()
        cross_entropy(other(x.to(dtype)), y).backward()
        theirs.step()
    assert_moved_alike(start, model, other, 0.1)


def test_another_optimizer_follows_each_replay(batches):
    model = linear()
    start, other = copy.deepcopy(model), copy.deepcopy(model)
    step = TrainStep(model, cross_entropy, torch.optim.RMSprop(model.parameters(), 1e-3))
    theirs = torch.optim.RMSprop(other.parameters(), 1e-3)
    for x, y in batches[:6]:
        step(x, y)
        theirs.zero_grad()
        cross_entropy(other(x), y).backward()
        theirs.step()
    assert isinstance(step._update, TorchUpdate)
    assert captured(step) == 1
    assert_moved_alike(start, model, other)


@pytest.mark.parametrize("name", CAPTURABLE)
def test_optimizers_that_torch_captures_are_a_part_of_the_step(name, batches):
    model = linear()
    start, other = copy.deepcopy(model), copy.deepcopy(model)
    ours, theirs = (CAPTURABLE[name](m.parameters()) for m in (model, other))
    mine, their = (torch.optim.lr_scheduler.StepLR(o, 3, 0.7) for o in (ours, theirs))
    scale = LossScale(1.0, growth_interval=10**6)
    step = TrainStep(model, cross_entropy, ours, max_norm=0.5, scale=scale)
    assert isinstance(step._update, CapturableUpdate)
    with strict():
        for x, y in batches:
            step(x, y)
            mine.step()
            theirs.zero_grad()
            cross_entropy(other(x), y).backward()
            nn.utils.clip_grad_norm_(other.parameters(), 0.5)
            theirs.step()
            their.step()
    assert [kind.whole for kind in step._run._kinds.values()] == [True]
    assert_moved_alike(start, model, other)


def test_a_loaded_state_may_keep_more_than_the_one_before(batches):
    model = linear()
    start, other = copy.deepcopy(model), copy.deepcopy(model)
    ours = torch.optim.AdamW(model.parameters(), 1e-2)
    theirs = torch.optim.AdamW(other.parameters(), 1e-2, amsgrad=True)
    step = TrainStep(model, cross_entropy, ours)
    for index, (x, y) in enumerate(batches[:9]):
        theirs.zero_grad()
        cross_entropy(other(x), y).backward()
        theirs.step()
        step(x, y)
        if index == 3:
            model.load_state_dict(other.state_dict())
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert captured(step) == 1
    assert_moved_alike(start, model, other)


def held_by(model, optimizer):
    """Copies of all that a step changes."""
    states = [state[key] for state in optimizer.state.values() for key in sorted(state)]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *states)]


OVERFLOWING = {
    "by our kernels, clipped": (lambda p: torch.optim.AdamW(p, 0.01), 0.5),
    # At ten times this rate eager itself is 0.026 of the way from float64 after these steps.
    "captured, taken back": (
        lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9, capturable=True),
        None,
    ),
}


@pytest.mark.parametrize("name", OVERFLOWING)
def test_overflows_are_left_out_and_scales_move_as_torchs(name, batches):
    make, max_norm = OVERFLOWING[name]

    def loss(y, target, factor):
        return cross_entropy(y, target) * factor

    model = linear()
    start, other = copy.deepcopy(model), copy.deepcopy(model)
    ours, theirs = (make(m.parameters()) for m in (model, other))
    scale = LossScale(8.0, growth_interval=3)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=3)
    step = TrainStep(model, loss, ours, scale=scale, max_norm=max_norm)
    for index, (x, y) in enumerate(batches):
        infinite = index in (3, 9, 10)
        factor = torch.tensor(float("inf") if infinite else 1.0, device="cuda")
        before = held_by(model, ours)
        step(x, y, factor)
        assert bool(step.found_inf) == infinite
        if infinite:
            assert all(map(torch.equal, before, held_by(model, ours)))
        theirs.zero_grad()
        scaler.scale(loss(other(x), y, factor)).backward()
        if max_norm is not None:
            scaler.unscale_(theirs)
            nn.utils.clip_grad_norm_(other.parameters(), max_norm)
        scaler.step(theirs)
        scaler.update()
        assert scale.state_dict() == scaler.state_dict()
    assert captured(step) == 1
    assert all(kind.whole for kind in step._run._kinds.values())
    assert {int(state["step"]) for state in ours.state.values()} == {17}
    assert_moved_alike(start, model, other)


@pytest.mark.parametrize("capturable", [True, False])
def test_a_loss_scale_beside_bfloat16_and_an_optimizer_of_torchs(capturable, batches):
    """GradScaler itself refuses it: torch unscales no gradients of this type on a GPU."""

    def made(module):
        return torch.optim.RMSprop(module.parameters(), 1e-3, momentum=0.5, capturable=capturable)

    def loss(y, target, factor):
        return cross_entropy(y.float(), target) * factor

    model = linear().bfloat16()
    start, other = copy.deepcopy(model), copy.deepcopy(model)
    ours, theirs = made(model), made(other)
    scale = LossScale(8.0, growth_interval=3)
    step = TrainStep(model, loss, ours, scale=scale, max_norm=0.5)
    scales = []
    for index, (x, y) in enumerate(batches):
        infinite = index in (4, 11)
        factor = torch.tensor(float("inf") if infinite else 1.0, device="cuda")
        before = held_by(model, ours)
        step(x.bfloat16(), y, factor)
        assert bool(step.found_inf) == infinite
        scales.append(scale.state_dict()["scale"])
        if infinite:
            assert all(map(torch.equal, before, held_by(model, ours)))
            continue
        theirs.zero_grad()
        loss(other(x.bfloat16()), y, factor).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        theirs.step()
    assert captured(step) == 1
    # Doubled each third step, halved after an overflow, which begins the count anew.
    grown = [(8, 2), (16, 2), (8, 3), (16, 3), (32, 1), (16, 3), (32, 3), (64, 3)]
    assert scales == [float(value) for value, steps in grown for _ in range(steps)]
    # A rounding to 8 bits of a weight is a large part of such a step.
    assert_moved_alike(start, model, other, 0.2)


def test_a_saved_state_resumes_exactly(batches):
    model = nn.Sequential(nn.Flatten(), nn.Linear(35, 16), nn.Dropout(0.5), nn.Linear(16, 5)).cuda()
    other = copy.deepcopy(model)

    def made(module):
        optimizer = torch.optim.AdamW(module.parameters(), 0.01)
        return TrainStep(module, cross_entropy, optimizer, scale=LossScale(4.0, growth_interval=2))

    step = made(model)
    for x, y in batches[:5]:
        step(x, y)
    file = io.BytesIO()
    torch.save([model.state_dict(), step.state_dict()], file)
    wanted = [step(x, y) for x, y in batches[5:9]]
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other.load_state_dict(weights)
    again = made(other)
    again.load_state_dict(state)
    found = [again(x, y) for x, y in batches[5:9]]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert len({float(value) for value in [step(*batches[0]) for _ in range(4)]}) == 4


class TestReplays:
    def test_values_stay_and_evaluation_sees_new_weights(self, batches):
        model = linear()
        step = TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
        values, outputs = [], []
        for x, y in batches[:5]:
            values.append(step(x, y))
            with torch.no_grad():
                outputs.append(model(batches[0][0]))
        kept = [value.clone() for value in values]
        step(*batches[5])
        assert all(map(torch.equal, values, kept))
        assert all(not torch.equal(a, b) for a, b in pairwise(outputs))

    def test_sizes_micro_batches_and_modes(self, batches):
        model = nn.Sequential(nn.Flatten(), nn.Linear(35, 16), nn.BatchNorm1d(16), nn.Linear(16, 5))
        model = model.cuda()
        start, other = copy.deepcopy(model), copy.deepcopy(model)
        step = TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
        theirs = torch.optim.SGD(other.parameters(), 0.1)
        for index, (x, y) in enumerate(batches):
            size = 5 if index % 4 == 3 else 8
            for module in (model, other):
                module.train(index < 15)
            step(x[:size], y[:size])
            theirs.zero_grad()
            cross_entropy(other(x[:size]), y[:size]).backward()
            theirs.step()
        assert captured(step) >= 1
        assert_moved_alike(start, model, other)

    def test_micro_batches_add_up(self, batches):
        model = linear()
        start, other = copy.deepcopy(model), copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = TrainStep(model, cross_entropy, optimizer, micro_batches=4)
        theirs = torch.optim.SGD(other.parameters(), 0.1)
        for x, y in batches[:5]:
            step(x, y)
            theirs.zero_grad()
            cross_entropy(other(x), y).backward()
            theirs.step()
        assert_moved_alike(start, model, other)

    def test_a_loss_that_waits_for_the_gpu_is_named_and_right(self, batches):
        model = linear()
        start, other = copy.deepcopy(model), copy.deepcopy(model)

        def loss(y, target):
            value = cross_entropy(y, target)
            return value / max(value.item(), 1.0)

        step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.1))
        theirs = torch.optim.SGD(other.parameters(), 0.1)
        step(*batches[0])
        with pytest.warns(UncapturedStep, match=r"test_on_gpu\.py:\d+"):
            step(*batches[1])
        for x, y in batches[2:4]:
            step(x, y)
        for x, y in batches[:4]:
            theirs.zero_grad()
            loss(other(x), y).backward()
            theirs.step()
        assert_moved_alike(start, model, other)

    def test_memory_does_not_grow_with_captures(self, batches):
        model = linear()
        step = TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
        held = []
        for _ in range(8):
            for x, y in batches[:3]:
                step(x, y)
            step.refresh()
            gc.collect()
            held.append(torch.cuda.memory_allocated())
        # What earlier tests left may come or go; of each capture even the gradients would be seen.
        gradients = sum(p.numel() * p.element_size() for p in model.parameters())
        assert held[-1] - held[2] < 5 * gradients


def test_a_convolutional_network_in_16_bits(randomise):
    model = randomise(SEResNet9Fixup(3, base_planes=16)).cuda().half()
    model = model.to(memory_format=torch.channels_last)
    exact = copy.deepcopy(model).to(memory_format=torch.contiguous_format).double()
    x = torch.randn(16, 3, 64, 64, device="cuda").half()
    target = torch.randn(16, 128, 2, 2, device="cuda")

    def loss(y, target):
        return (y.float() - target).square().mean()

    def exactly(y, target):
        return (y - target).square().mean()

    step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), 1e-3))
    theirs = torch.optim.SGD(exact.parameters(), 1e-3)
    for _ in range(4):
        value = step(x, target)
        theirs.zero_grad()
        wanted = exactly(exact(x.double()), target.double())
        wanted.backward()
        theirs.step()
        wanted = float(wanted.detach())
        assert abs(float(value) - wanted) <= 0.02 * wanted
    assert captured(step) == 1
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        own, wanted = p.detach().double(), q.detach()
        assert float((own - wanted).norm()) <= 0.01 * float(wanted.norm()), name


@pytest.mark.parametrize("benchmark", [False, True])
def test_cudnn_may_try_its_algorithms(benchmark):
    """It does so in the first call of each thread, and gradients have threads of their own."""
    layers = (nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(72, 5)).cuda()
    start, other = copy.deepcopy(model), copy.deepcopy(model)
    step = TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    theirs = torch.optim.SGD(other.parameters(), 0.1)
    with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark):
        for _ in range(4):
            x = torch.randn(8, 3, 16, 16, device="cuda")
            y = torch.randint(5, (8,), device="cuda")
            step(x, y)
            theirs.zero_grad()
            cross_entropy(other(x), y).backward()
            theirs.step()
    assert captured(step) == 1
    assert_moved_alike(start, model, other)
