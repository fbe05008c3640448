"""With `frozen` on a CPU: weights that were prepared stay as they were until `refresh`."""

from __future__ import annotations

import pytest
import torch

from plantune import optimize


@pytest.fixture
def frozen(small, images, tuned, by_hand):
    """Its convolutions read prepacked weights."""
    return optimize(small, images, plan=by_hand(tuned(small, images)), frozen=True)


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_weight_that_changed_is_seen_after_refresh(frozen, images, close, weights_only):
    before = frozen(images)
    with torch.no_grad():
        frozen.reference.layers[0][0].conv1.weight.mul_(2)
    assert torch.equal(frozen(images), before)
    frozen.refresh(weights_only=weights_only)
    after = frozen(images)
    assert not torch.equal(after, before)
    with torch.no_grad():
        close(after, frozen.reference(images))
    assert torch.equal(frozen(images), after)


def test_a_step_of_an_optimizer_is_seen_after_refresh(frozen, images, close):
    weight = frozen.reference.layers[0][0].conv1.weight
    weight.grad = torch.ones_like(weight)
    before = frozen(images)
    torch.optim.SGD([weight], lr=0.1).step()
    assert torch.equal(frozen(images), before)
    frozen.refresh()
    with torch.no_grad():
        close(frozen(images), frozen.reference(images))


def test_without_it_the_next_call_sees_the_change(small, images, tuned, close):
    model = tuned(small, images, plan="hand")
    model(images)
    with torch.no_grad():
        model.reference.layers[0][0].conv1.weight.mul_(2)
        close(model(images), model.reference(images))
