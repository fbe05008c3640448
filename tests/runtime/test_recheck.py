"""A plan from elsewhere must compute the network here before it is used."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune import load_model, optimize
from plantune.environment import cpu_environment
from plantune.errors import WrongResult
from plantune.kernels import torch_ops
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plan_db import PlanDatabase
from plantune.runtime.choose import NoStoredPlan
from plantune.runtime.recheck import recheck
from plantune.space.search_space import load_search_space

NAME = "se_resnet9_fixup"
SPACE = load_search_space("cpu")


@pytest.fixture
def fixup():
    """As before training: the second convolutions are zero, and hide what goes wrong there."""
    return SEResNet9Fixup(3, base_planes=16).eval()


def checked(module, x, mode="infer"):
    pool = optimize(module, x, mode=mode).pool()
    recheck(pool.graph, pool.plan, SPACE, module.train(mode == "train"))


@pytest.fixture
def broken_sigmoid(monkeypatch):
    """A kernel that is off by a hundredth, where zeros follow in a fresh Fixup network."""

    def make(node, values):
        (a,), y = node.inputs, values[node.name]
        return lambda: torch.sigmoid(values[a], out=y).mul_(1.01)

    monkeypatch.setitem(torch_ops.MAKERS, "sigmoid", make)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_right_plan_passes(fixup, images, mode):
    checked(fixup, images, mode)


@pytest.mark.usefixtures("broken_sigmoid")
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_mistake_that_first_weights_hide_is_found(fixup, images, mode):
    with pytest.raises(WrongResult, match=r"output 0 is off by .* allowed"):
        checked(fixup, images, mode)


def test_several_outputs_and_statistics(images):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            y = self.norm(x)
            return y, torch.relu(y)

    checked(Two(), images, "train")


def test_the_module_and_the_users_random_numbers_stay(fixup, images):
    before, state = copy.deepcopy(fixup.state_dict()), torch.get_rng_state()
    checked(fixup, images)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in fixup.state_dict().items())


class TestLoading:
    @pytest.fixture
    def store(self):
        def put(**changes):
            plan = load_model(NAME, batch=1, fallback="silent").plan
            with PlanDatabase.open() as database:
                database.put_plan(plan, replace(cpu_environment(), **changes))

        return put

    def said(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = load_model(NAME, batch=1)
            with torch.no_grad():
                model(torch.randn(1, 3, 64, 64))
        return [(item.category, str(item.message)) for item in caught]

    @pytest.mark.usefixtures("broken_sigmoid")
    def test_a_wrong_one_is_passed_over(self, store):
        store(torch="2.0.0")
        ((category, message),) = self.said()
        assert category is NoStoredPlan
        assert "cannot run here" in message
        assert "off by" in message

    @pytest.mark.usefixtures("broken_sigmoid")
    def test_one_of_this_machine_was_checked_when_it_was_made(self, store):
        store()
        assert self.said() == []
