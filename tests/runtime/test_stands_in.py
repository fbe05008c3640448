"""The tuned module stands in for the original."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from plantune import UnplannedCall, optimize
from plantune.errors import UnsupportedModule


class Policy(nn.Module):
    n_actions = 4
    limit = 2

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, self.n_actions)
        self.gain = 1.0
        self.seen = 0

    def forward(self, x):
        return self.body(x) * self.gain

    def act(self, x):
        self.seen += 1
        return self(x).argmax(-1)

    @property
    def size(self):
        return self.body.weight.numel()

    @staticmethod
    def kind():
        return "policy"

    def extra_repr(self):
        return super().extra_repr() + "a policy"

    def described(self):
        return f"{super().__repr__()} of {self.n_actions}"


@pytest.fixture
def x():
    return torch.randn(5, 3)


@pytest.fixture
def policy():
    return Policy().eval()


@pytest.fixture
def model(policy, x):
    return optimize(policy, x)


def test_attributes_are_the_originals(model):
    assert (model.n_actions, model.gain, model.size, model.kind()) == (4, 1.0, 12, "policy")
    assert hasattr(model, "act")
    assert not hasattr(model, "missing")
    with pytest.raises(AttributeError, match="'Policy' object has no attribute 'missing'"):
        model.missing  # noqa: B018
    assert {"act", "n_actions", "body", "refresh"} <= set(dir(model))


def test_a_method_runs_from_the_plan(model, policy, x):
    assert torch.equal(model.act(x), policy.act(x))
    assert model.last_call().how == "planned"
    assert (model.seen, model.reference.seen) == (1, 1)


def test_a_method_that_needs_its_class(model):
    assert "of 4" in model.described()


def test_setting_does_what_it_did(model, policy, x, close):
    before = model(x)
    model.gain = 3.0
    close(model(x), before * 3)
    assert model.reference.gain == 3.0
    model.body = nn.Linear(3, 2)
    assert model(x).shape == (5, 2)
    assert "body.weight" in dict(model.named_parameters())
    model.extra = nn.Parameter(torch.ones(1))
    assert model.reference.extra is model.extra
    del model.extra
    assert not hasattr(model.reference, "extra")


def test_setting_what_the_tuned_module_needs_itself_raises(model):
    with pytest.raises(AttributeError, match="'plan' is the tuned module's own"):
        model.plan = 3


def test_items_are_the_originals(x):
    model = optimize(nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval(), x)
    assert len(model) == 2
    assert [*model] == [model[0], model[1]]
    assert isinstance(model[-1], nn.ReLU)
    assert model


@pytest.mark.filterwarnings("error")
def test_other_arguments_than_planned(x, close):
    class Flagged(nn.Module):
        def forward(self, x, scale=1.0):
            return torch.relu(x) * scale

    model = optimize(Flagged().eval(), x)
    with pytest.warns(UnplannedCall, match=r"got \(5, 3\), 2\.0"):
        close(model(x, scale=2.0), torch.relu(x) * 2)
    close(model(x), torch.relu(x))


def test_what_cannot_be_traced_is_named_at_once_with_its_line(policy, x):
    policy.forward = lambda v: v * policy.body(v).sum().item()
    line = inspect.getsourcelines(policy.forward)[1]
    with pytest.raises(UnsupportedModule, match=rf"values.*{__file__}:{line}"):
        optimize(policy, x)


def test_passes_that_wait_for_their_backward_pass_are_bounded(policy, x, close):
    model = optimize(policy, x, mode="train", fallback="silent")
    losses = [model(x + i).square().sum() for i in range(20)]
    assert model.stats().instances == 8
    assert "8 passes wait for their backward pass" in model.last_call().reason
    expected = [policy(x + i).square().sum() for i in range(20)]
    for module, sums in ((model, losses), (policy, expected)):
        module.zero_grad()
        torch.stack(sums).sum().backward()
    for ours, theirs in zip(model.parameters(), policy.parameters(), strict=True):
        close(ours.grad, theirs.grad)
    model(x)
    assert (model.last_call().how, model.stats().instances) == ("planned", 8)
