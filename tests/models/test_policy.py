"""An agent's policy tunes as one module: its vision, memory and heads, a step and a sequence."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from plantune import TrainStep, optimize
from plantune.models.policy import Policy, PolicySizes, policy

SMALL = PolicySizes(in_channels=2, actions=3, base_planes=16, seen=32, hidden=24, embedding=4)
Given = tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]


@pytest.fixture
def agent() -> Policy:
    torch.manual_seed(0)
    made = policy(SMALL).eval()
    for parameter in made.vision.parameters():  # Fixup begins with zeros
        nn.init.normal_(parameter, std=0.1)
    return made


def drawn(steps: int, agents: int) -> Given:
    images = torch.randn(steps, agents, 2, 64, 64)
    actions, done = torch.randint(3, (steps, agents)), torch.rand(steps, agents) < 0.4
    return images, actions, done, tuple(torch.randn(2, agents, 24) for _ in range(2))


def test_a_sequence_is_its_steps_one_after_the_other(agent: Policy) -> None:
    images, actions, done, state = drawn(5, 3)
    with torch.no_grad():
        logits, values, last = agent(images, actions, done, state)
        for step in range(5):
            of_step = (part[step : step + 1] for part in (images, actions, done))
            one, value, state = agent(*of_step, state)
            torch.testing.assert_close(one[0], logits[step])
            torch.testing.assert_close(value[0], values[step])
    torch.testing.assert_close(state, last)


def test_nothing_before_an_episode_counts(agent: Policy) -> None:
    images, actions, done, state = drawn(1, 3)
    done[:] = True
    with torch.no_grad():
        made = agent(images, actions, done, state)[0]
        begun = agent(images, (actions + 1) % 3, done, agent.begin(3))[0]
    torch.testing.assert_close(made, begun)


def test_it_acts_as_one_module(agent: Policy) -> None:
    given = drawn(1, 4)
    tuned = optimize(agent, *given, fallback="silent")
    for _ in range(2):
        torch.testing.assert_close(tuned(*given), agent(*given))
        given = drawn(1, 4)


def loss(made: tuple[Tensor, Tensor, object], chosen: Tensor, returns: Tensor) -> Tensor:
    """An actor's and a critic's."""
    logits, values, _ = made
    likely = nn.functional.cross_entropy(logits.flatten(0, 1), chosen.flatten())
    return likely + (values - returns).square().mean()


def test_it_trains_as_one_step(agent: Policy) -> None:
    other = copy.deepcopy(agent)
    given, chosen, returns = drawn(3, 4), torch.randint(3, (3, 4)), torch.randn(3, 4)
    step = TrainStep(agent, loss, torch.optim.SGD(agent.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        value = loss(other(*given), chosen, returns)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        torch.testing.assert_close(step(given, chosen, returns), value.detach())
    for (name, ours), theirs in zip(
        agent.state_dict().items(), other.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, msg=name)
