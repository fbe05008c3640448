"""With `consistent=True` an image has the same outputs in acting and in learning, to the bit."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan, framework_plans
from plantune.runtime.calls import consistent
from plantune.runtime.calls.consistent import InconsistentPlans, transferred
from plantune.space.search_space import load_search_space


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error", InconsistentPlans)
        yield


@pytest.fixture
def policy(randomise):
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU())
    return randomise(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 6)))


@pytest.fixture
def frames():
    return torch.randn(16, 3, 8, 8)


def acted(model, frames):
    with torch.no_grad():
        return model(frames)


def test_the_ratio_of_ppo_is_one_on_fresh_data(policy, frames):
    model = optimize(policy, frames, mode="train", consistent=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        chosen = torch.cat([acted(model, part).log_softmax(-1) for part in frames.split(4)])
        new = model(frames).log_softmax(-1)
        assert torch.equal((new - chosen).exp(), torch.ones_like(new))
        optimizer.zero_grad()
        new.square().mean().backward()
        optimizer.step()
    assert model.stats().eager == 0


def test_both_are_one_plan(policy, frames):
    model = optimize(policy, frames, mode="train", consistent=True)
    model(frames).sum().backward()
    acted(model, frames)
    acted(model, frames[:4])
    first, second = model.pools()
    assert first.plan.choices == second.plan.choices
    assert first.graph.inputs[0][1].shape == (16, 3, 8, 8)
    assert model.stats().eager == 0


def test_the_backward_pass_is_that_of_the_own_plan(policy, frames):
    """A config for a large batch may be illegal for a small one; the forward pass counts alone."""
    space = load_search_space("cpu")
    large, small = (
        optimize(policy, frames[:batch], mode="train").pool().graph for batch in (16, 4)
    )
    leader = framework_plan(large, space, network="leader")
    own = framework_plans(small, space, network="own")[1]
    made = transferred(leader, check_plan(own, small, space)).plan
    forward = {node.name for node in small.nodes[: small.backward_from]}
    for choice in made.choices:
        of = leader if choice.nodes[0] in forward else own
        assert choice in of.choices
    assert {choice.nodes for choice in made.choices} == {choice.nodes for choice in own.choices}


def test_without_it_acting_has_a_plan_of_its_own(policy, frames):
    model = optimize(policy, frames, mode="train")
    model(frames).sum().backward()
    acted(model, frames)
    assert {pool.graph.backward_from is None for pool in model.pools()} == {True, False}


def test_statistics_of_a_batch_are_said(policy, frames):
    policy.insert(1, nn.BatchNorm2d(8))
    model = optimize(policy.train(), frames, mode="train", consistent=True)
    with pytest.warns(InconsistentPlans, match="statistics of a batch"):
        acted(model, frames[:4])


def test_outputs_that_differ_are_said(policy, frames, monkeypatch):
    monkeypatch.setattr(consistent, "_apart", lambda a, b: 0.25)
    model = optimize(policy, frames, mode="train", consistent=True)
    with pytest.warns(InconsistentPlans, match=r"differ by 0\.25 of the largest, by how the fra"):
        acted(model, frames[:4])


def test_a_plan_that_another_batch_cannot_have_is_said(policy, frames, monkeypatch, close):
    monkeypatch.setattr(
        "plantune.runtime.calls.choose.transferred", lambda *_: "a tile is too large"
    )
    model = optimize(policy, frames, mode="train", consistent=True)
    with pytest.warns(InconsistentPlans, match="a tile is too large"):
        found = acted(model, frames[:4])
    close(found, policy(frames[:4]))


def test_it_is_about_training(policy, frames):
    with pytest.raises(ValueError, match="needs mode"):
        optimize(policy, frames, consistent=True)
