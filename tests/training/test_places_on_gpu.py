"""On a GPU a step reads gradients wherever a backward pass left them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from plantune import TrainStep, optimize
from plantune.models.se_resnet9 import SEResNet9Fixup

from .on_gpu import OPTIMIZERS, assert_moved_alike, captured, linear, random_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]


@pytest.fixture
def batches():
    return random_batches()


class Head(nn.Module):
    """Two weights with one gradient in autograd, one at an odd place, and one without any."""

    def __init__(self):
        super().__init__()
        self.p, self.q = (nn.Parameter(torch.randn(5, 5, device="cuda")) for _ in range(2))
        self.w = nn.Parameter(torch.randn(3001, device="cuda")[1:])
        self.unused = nn.Parameter(torch.randn(7, device="cuda"))

    def forward(self, y, target):
        return cross_entropy(y @ (self.p + self.q) + self.w.view(600, 5).mean(0), target)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_read_wherever_they_are(name, batches):
    model, head = linear(), Head()
    start, other, its = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(head)
    begun = copy.deepcopy(head)
    assert head.w.data_ptr() % 16
    ours, theirs = (
        OPTIMIZERS[name]([*m.parameters(), *h.parameters()])
        for m, h in ((model, head), (other, its))
    )
    step = TrainStep(model, head, ours)
    for x, y in batches[:8]:
        step(x, y)
        theirs.zero_grad()
        its(other(x), y).backward()
        found = [p.grad for p in (*other.parameters(), *its.parameters()) if p.grad is not None]
        norm = torch.stack([each.norm() for each in found]).norm()
        torch.testing.assert_close(step.gradient_norm, norm, rtol=1e-3, atol=1e-5)
        theirs.step()
    assert [kind.whole for kind in step._run._kinds.values()] == [True]
    assert_moved_alike(start, model, other)
    assert torch.equal(head.unused, begun.unused)
    begun.unused = head.unused = its.unused = None
    assert_moved_alike(begun, head, its)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_loss_may_run_the_model_twice(parts, batches):
    model = linear()
    start, other = copy.deepcopy(model), copy.deepcopy(model)
    tuned = optimize(model, batches[0][0][: 8 // parts], mode="train", share=True)

    def of(module):
        """One gradient is there before the others are made, and counts in them."""

        def loss(y, x, target):
            weight = module[1].weight
            (early,) = torch.autograd.grad(module(x).square().mean(), weight)
            return cross_entropy(y, target) + (early * weight).sum()

        return loss

    ours = torch.optim.SGD(model.parameters(), 0.1)
    step = TrainStep(tuned, of(tuned), ours, micro_batches=parts)
    theirs = torch.optim.SGD(other.parameters(), 0.1)
    for x, y in batches[:5]:
        step(x, x, y)
        theirs.zero_grad()
        for part, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (of(other)(other(part), part, target) / parts).backward()
        theirs.step()
    assert captured(step) == 1
    assert_moved_alike(start, model, other)


def other_places(x, index):
    """Images at an odd place, or in another order."""
    if index == 3:
        memory = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")
        return memory[1:].view(x.shape).copy_(x)
    return x.to(memory_format=torch.channels_last) if index == 5 else x


def test_images_are_read_wherever_they_are(randomise):
    model = randomise(SEResNet9Fixup(3, base_planes=16)).cuda().half()
    model = model.to(memory_format=torch.channels_last)
    exact = copy.deepcopy(model).to(memory_format=torch.contiguous_format).double()
    target = torch.randn(16, 128, 2, 2, device="cuda")

    def loss(y, target):
        return (y - target).square().mean() if y.dtype == torch.double else loss(y.double(), target)

    tuned = optimize(
        model, torch.randn(16, 3, 64, 64, device="cuda").half(), mode="train", share=True
    )
    step = TrainStep(tuned, loss, torch.optim.SGD(model.parameters(), 0.0))
    for index in range(8):
        x = (torch.randn(16, 3, 64, 64, device="cuda") * (0.5 + index % 3 / 2)).half()
        wanted = float(loss(exact(x.double()), target.double()).detach())
        value = float(step(other_places(x, index), target))
        assert abs(value - wanted) <= 0.02 * wanted, index
    (kind,) = step._run._kinds.values()
    assert kind.captured._moving, "its stem reads images in place"


def test_a_loss_that_somebody_keeps_is_no_hindrance():
    """Its graph holds nodes of the default stream, for which a capture must not wait."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).cuda()
    start, other = copy.deepcopy(model), copy.deepcopy(model)
    x, y = torch.randn(8, 3, 8, 8, device="cuda"), torch.randint(5, (8,), device="cuda")
    kept = [cross_entropy(model(x), y)]
    kept[0].backward()
    step = TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    theirs = torch.optim.SGD(other.parameters(), 0.1)
    for _ in range(4):
        step(x, y)
    for _ in range(4):
        theirs.zero_grad()
        cross_entropy(other(x), y).backward()
        theirs.step()
    assert captured(step) == 1
    assert_moved_alike(start, model, other)


def test_what_a_loss_keeps_moves_once_a_step():
    """The runs before the capture move it, too, and put it back."""
    model, judge = linear(), nn.BatchNorm1d(5).cuda()
    start, other, its_judge = map(copy.deepcopy, (model, model, judge))
    center, its_center = (torch.zeros(5, device="cuda") for _ in range(2))

    def loss(y, target, judge=judge, center=center):
        center.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        # Before a batch norm alone a bias would have no gradient but rounding.
        return cross_entropy(y - center, target) + judge(y).abs().mean()

    step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.1))
    theirs = torch.optim.SGD(other.parameters(), 0.1)
    for x, y in random_batches()[:5]:
        step(x, y)
        theirs.zero_grad()
        loss(other(x), y, its_judge, its_center).backward()
        theirs.step()
    assert captured(step) == 1
    assert_moved_alike(start, model, other)
    torch.testing.assert_close(center, its_center)
    torch.testing.assert_close(judge.state_dict(), its_judge.state_dict())
