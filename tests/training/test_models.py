"""Which calls of a model more than its plan may see."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from plantune import TrainStep, UnplannedCall, optimize
from plantune.training.models import Models


@pytest.fixture
def x():
    return torch.randn(8, 3, 8, 8)


@pytest.fixture
def by_hand(monkeypatch):
    """Without a stored plan a CPU runs eager."""
    from plantune.plans.guess import COMPILED, hand_plan

    monkeypatch.setattr(
        "plantune.runtime.calls.choose.guessed_plan",
        lambda *args, **options: hand_plan(*args, **options, without=COMPILED),
    )


def test_those_of_a_plan_are_seen_by_nobody_else(model, x, by_hand):
    models = Models(optimize(model, x, mode="train"))
    models(x)
    assert models.seen() == 0


def test_eager_ones_are_counted(model, x):
    models = Models(optimize(model, x, mode="train", fallback="silent"))
    models(x[:3])
    assert models.seen() == 1


def test_hooks_see_calls(model, x, by_hand):
    tuned = optimize(model, x, mode="train", fallback="silent")
    models = Models(tuned)
    hook = tuned.register_forward_pre_hook(lambda *_: None)
    models(x)
    assert models.seen() == 1
    hook.remove()
    models(x)
    assert models.seen() == 1
    hook = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    models(x)
    hook.remove()
    assert models.seen() > 1


def test_a_module_without_a_plan_sees_its_own(x):
    class Branching(nn.Module):
        def forward(self, x):
            return x if float(x.sum()) > 0 else -x

    models = Models(Branching())
    with pytest.warns(UnplannedCall, match="no plan runs Branching in a TrainStep") as said:
        models(x)
    assert said[0].filename == __file__
    models(x)
    assert models.seen() == 2


def test_images_in_16_bits_under_autocast(x, by_hand):
    """Without autocast such a call is an error, of which no plan can be."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    other, y = copy.deepcopy(model), torch.randint(5, (8,))
    x = x.bfloat16()

    def loss(outputs, target):
        return cross_entropy(outputs.float(), target)

    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    step = TrainStep(model, loss, optimizer, autocast=torch.bfloat16)
    theirs = torch.optim.SGD(other.parameters(), 0.05)
    for _ in range(3):
        value = step(x, y)
        theirs.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            wanted = loss(other(x), y)
        wanted.backward()
        theirs.step()
        torch.testing.assert_close(value, wanted.detach(), rtol=0.02, atol=0.02)
    (tuned,) = step._models._made.values()
    assert (tuned.stats().planned, tuned.stats().eager) == (3, 0)


def test_another_model_loss_and_optimizer_may_take_their_places(
    model, twin, eager, batches, assert_alike
):
    later, other = twin(model), twin(model)
    step = TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    step(*batches[0])
    before = [parameter.clone() for parameter in model.parameters()]
    step.model, step.loss = later, lambda y, wanted: 2 * cross_entropy(y, wanted)
    step.optimizer = torch.optim.Adam(later.parameters(), 1e-2)
    theirs = torch.optim.Adam(other.parameters(), 1e-2)
    for x, y in batches:
        torch.testing.assert_close(step(x, y), 2 * eager(other, theirs, x, y), rtol=1e-4, atol=1e-5)
    assert_alike(later, other)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_model_that_shares_its_weights_follows_before_each_step(model, x):
    """A captured step is replayed without a call of the model."""
    tuned = optimize(model, x, mode="train", share=True, fallback="silent")
    step = TrainStep(tuned, cross_entropy, torch.optim.SGD(tuned.parameters(), 0.1))
    twin = tuned.reference
    name, layer = next((n, m) for n, m in model.named_children() if isinstance(m, nn.Conv2d))
    setattr(model, name, nn.Sequential(layer))
    model.train()
    step._follow_parameters()
    assert isinstance(getattr(twin, name), nn.Sequential)
    assert getattr(twin, name)[0].weight is layer.weight
