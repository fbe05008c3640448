"""A tuned module that shares its weights with the module that it was made of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.plans.guess import framework_plan
from plantune.space.search_space import load_search_space


@pytest.fixture
def module():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).eval()


@pytest.fixture
def x():
    return torch.randn(3, 4)


@pytest.fixture
def actor(module, x):
    graph = optimize(module, x).pool().graph
    plan = framework_plan(graph, load_search_space("cpu"), network="actor")
    return optimize(module, x, plan=plan, share=True)


def alike(actor, module, x):
    with torch.no_grad():
        torch.testing.assert_close(actor(x), module(x))
    assert actor.last_call().how == "planned"


def replaced(m):
    m[0].weight = nn.Parameter(torch.randn(5, 4))


def loaded(m):
    state = {name: torch.rand_like(t) + 0.5 for name, t in m.state_dict().items() if t.dim()}
    m.load_state_dict(state, strict=False, assign=True)


UPDATES = {
    "in place": lambda m: [p.data.mul_(2) for p in m.parameters()] and m.zero_grad(),
    "statistics": lambda m: m[1].running_mean.add_(1),
    "another parameter": replaced,
    "loaded": loaded,
    "another buffer": lambda m: setattr(m[1], "running_var", torch.rand(5) + 0.5),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("by_actor", [False, True])
def test_an_update_of_either_counts_in_both(update, by_actor, actor, module, x):
    alike(actor, module, x)
    before = module(x)
    with torch.no_grad():
        update(actor if by_actor else module)
    actor.refresh(weights_only=True)  # for `.data`
    alike(actor, module, x)
    assert not torch.allclose(module(x), before)


def test_a_learner_and_its_actor(actor, module, x):
    learner = optimize(module.train(), torch.randn(8, 4), mode="train", share=True)
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        learner(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        reference = copy.deepcopy(module).eval()
        alike(actor, reference, x)
    assert [*actor.parameters()] == [*module.parameters()] == [*learner.parameters()]
    assert module.training
    assert not actor.training


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norms_that_a_pass_in_training_moves(planned, momentum, actor, module, x):
    """Eager writes to their statistics without a trace, as in `swa_utils.update_bn`."""
    for norm in (actor[1], module[1]):
        norm.momentum = momentum
    alike(actor, module, x)
    batch = torch.randn(8, 4) * 3
    before = module(x)
    module.train()
    learner = optimize(module, batch, mode="train", share=True) if planned else module
    for _ in range(3):
        learner(batch)
        alike(actor, copy.deepcopy(module).eval(), x)
    assert not torch.allclose(module.eval()(x), before)


def test_modes_and_attributes_are_the_copys_own(actor, module):
    actor.train()
    actor[2].inplace = True
    assert not module.training
    assert not module[2].inplace


def test_without_it_nothing_is_shared(module, x):
    tuned = optimize(module, x)
    ours = {t.data_ptr() for t in (*tuned.parameters(), *tuned.buffers())}
    assert ours.isdisjoint(t.data_ptr() for t in (*module.parameters(), *module.buffers()))


@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM])
def test_a_recurrent_layer(cell):
    x = torch.randn(2, 3, 4)
    module = cell(4, 5, batch_first=True).eval()
    actor = optimize(module, x, share=True)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3)
        torch.testing.assert_close(actor(x)[0], module(x)[0])
