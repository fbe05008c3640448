"""A tuned feature extractor in a policy of somebody else's, as stable-baselines3's PPO has it.

There the extractor has three names, the optimizer is made first, acting switches to eval mode, and
batches for acting and learning differ.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.plans.guess import COMPILED, hand_plan

ACTORS, STEPS, BATCH, EPOCHS = 3, 20, 6, 4
pytestmark = pytest.mark.filterwarnings("ignore::plantune.UnplannedCall")


@pytest.fixture(autouse=True)
def _plans(monkeypatch):
    """Kernels that keep copies of weights, where a CPU would run eager."""
    by_hand = partial(hand_plan, without=COMPILED)
    monkeypatch.setattr("plantune.runtime.calls.choose.guessed_plan", by_hand)


class Features(nn.Module):
    features_dim = 16

    def __init__(self, casts):
        super().__init__()
        self.casts = casts
        self.cnn = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten())
        self.linear = nn.Sequential(nn.Linear(8 * 9, 16), nn.ReLU())

    def forward(self, images):
        return self.linear(self.cnn(images.float() / 255 if self.casts else images))


class Policy(nn.Module):
    def __init__(self, casts):
        super().__init__()
        self.features_extractor = Features(casts)
        self.pi_features_extractor = self.vf_features_extractor = self.features_extractor
        self.net = nn.Linear(self.features_extractor.features_dim, 4)
        self.casts = casts
        self.optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)

    def forward(self, frames):
        return self.net(self.features_extractor(self.seen(frames)))

    def value(self, frames):
        return self.net(self.vf_features_extractor(self.seen(frames)))[:, 0]

    def seen(self, frames):
        return frames if self.casts else frames.float() / 255


def acted(policy, frames):
    policy.train(False)
    with torch.no_grad():
        return torch.stack([policy(each) + policy.value(each)[:, None] for each in frames])


def learned(policy, frames, targets):
    policy.train(True)
    for batch, target in zip(frames.split(BATCH), targets.split(BATCH), strict=True):
        loss = nn.functional.mse_loss(policy(batch), target)
        policy.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        policy.optimizer.step()


def run(policy):
    torch.manual_seed(0)
    found = []
    for _ in range(EPOCHS):
        frames = torch.randint(256, (STEPS, ACTORS, 3, 8, 8), dtype=torch.uint8)
        outputs = acted(policy, frames)
        learned(policy, frames.flatten(0, 1), outputs.flatten(0, 1).cos())
        found.append(outputs)
    return torch.stack(found)


@pytest.mark.parametrize("casts", [True, False], ids=["bytes", "floats"])
def test_it_learns_as_eager_does(casts, close):
    policy = Policy(casts)
    eager = copy.deepcopy(policy)
    eager.optimizer = torch.optim.Adam(eager.parameters(), lr=3e-3)
    keys = [*policy.state_dict()]
    frames = torch.zeros(BATCH, 3, 8, 8, dtype=torch.uint8)
    policy.features_extractor = optimize(
        policy.features_extractor, policy.seen(frames), mode="train", share=True
    )
    close(run(policy), run(eager))
    assert [*policy.state_dict()] == keys
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(policy.get_parameter(name), parameter, rtol=1e-3, atol=1e-5)
    stats = policy.features_extractor.stats()
    # The batch that acts is another one than the example's: it has a plan after a few calls.
    assert stats.planned > stats.eager


def test_a_policy_makes_its_own_extractor(close):
    """By a function in the place of the extractor's class."""
    torch.manual_seed(1)
    module = Features(casts=True)
    tuned = optimize(module, torch.zeros(BATCH, 3, 8, 8, dtype=torch.uint8), mode="train")
    assert tuned.features_dim == 16
    tuned.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None)
    assert bool((tuned.linear[0].weight == 1).all())
    again = copy.deepcopy(tuned)
    x = torch.randint(256, (BATCH, 3, 8, 8), dtype=torch.uint8)
    close(again(x), tuned.reference(x))


def test_calls_are_counted_though_modes_change_in_turns() -> None:
    """A2C acts five times before it learns again: neither came often enough in one go."""
    policy, frames = Policy(casts=True), torch.zeros(STEPS, 3, 8, 8, dtype=torch.uint8)
    tuned = policy.features_extractor = optimize(
        policy.features_extractor, frames[:BATCH], mode="train", share=True
    )
    for _ in range(10):
        acted(policy, frames[:12].view(4, ACTORS, 3, 8, 8))
        learned(policy, frames[:ACTORS], torch.zeros(ACTORS, 4))
    assert tuned.stats().planned > 20
