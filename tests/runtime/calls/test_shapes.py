"""One module called with several shapes: each has a plan of its own."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune import UnplannedCall, optimize
from plantune.devices.machine import cpu_environment
from plantune.errors import InputMismatch
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.proofs import remember_proof
from plantune.plans.guess import framework_plan
from plantune.plans.plan import PROGRAM
from plantune.runtime.calls.call_table import FEW_CALLS
from plantune.runtime.calls.inputs import MOST_CALLS, OFTEN
from plantune.space.search_space import load_search_space


@pytest.fixture
def module():
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()).eval()


def images(batch, size=6):
    return torch.randn(batch, 3, size, size)


@pytest.fixture
def store(module):
    """Stores a plan for each of these calls."""

    def put(*calls, mode="infer"):
        with PlanDatabase.open() as database:
            for x in calls:
                graph = optimize(module, x, mode=mode).pool().graph
                plan = framework_plan(graph, load_search_space("cpu"), network="stored")
                database.put_plan(replace(plan, origin="measured"), cpu_environment())
                remember_proof(plan, cpu_environment())

    return put


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnplannedCall)
        yield


@pytest.mark.usefixtures("quiet")
def test_each_shape_runs_from_its_own_plan(module, store, close):
    batches = [images(1), images(2), images(3, 8)]
    store(*batches)
    model = optimize(module, batches[0])
    for _ in range(3):
        for x in batches:
            close(model(x), module(x))
            assert model.last_call().how == "planned"
    assert model.stats().instances == len(batches)


@pytest.mark.usefixtures("quiet")
def test_each_shape_uses_the_weights_as_they_are(module, store, close):
    batches = [images(1), images(2)]
    store(*batches)
    model = optimize(module, batches[0])
    for _ in range(3):
        for x in batches:
            close(model(x), model.reference(x))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)


@pytest.mark.usefixtures("quiet")
def test_each_shape_has_gradients(module, store, close):
    module.train()
    batches = [images(2), images(3)]
    store(*batches, mode="train")
    model = optimize(module, batches[0], mode="train")
    for x in batches:
        for m in (model, module):
            m.zero_grad()
            m(x).square().sum().backward()
        assert model.last_call().how == "planned"
        for ours, theirs in zip(model.parameters(), module.parameters(), strict=True):
            close(ours.grad, theirs.grad)


def test_a_shape_without_a_plan_is_said_once_and_runs_in_the_framework(module, store, close):
    store(images(1))
    model = optimize(module, images(1))
    several = torch.randn(FEW_CALLS + 2, 2, 3, 6, 6)
    with pytest.warns(UnplannedCall, match=r"made for input \(1, 3.*got \(2, 3") as caught:
        found = [*map(model, several)]
    for ours, x in zip(found, several, strict=True):
        close(ours, module(x))
    assert len(caught) == 1
    assert model.stats().eager == FEW_CALLS
    assert model.last_call().how == "planned"  # from the default plan


@pytest.mark.usefixtures("quiet")
def test_without_a_plan_others_are_refused_if_asked(module, store):
    store(images(1), images(3))
    model = optimize(module, images(1), fallback="error")
    for _ in range(2):
        with pytest.raises(InputMismatch, match=r"got \(2, 3"):
            model(images(2))
        model(images(3))


@pytest.mark.filterwarnings("ignore::plantune.UnplannedCall")
def test_few_shapes_are_remembered(module):
    model = optimize(module, images(1, 4))
    for size in range(5, 5 + 2 * MOST_CALLS):
        x = images(1, size)
        assert torch.equal(model(x), module(x))
    assert len(model._calls._inputs._known) == MOST_CALLS
    for _ in range(OFTEN + 1):
        model(x)
    assert model._calls._inputs.known((x,), {}) is not None
    assert len(model._calls._inputs._known) == MOST_CALLS


def test_a_network_that_takes_another_way_for_a_shape(close):
    class Branching(nn.Module):
        def forward(self, x):
            return x.relu() if len(x) < 3 else x.relu()[: int(x.sum() > 0) + 1]

    module = Branching()
    model = optimize(module.eval(), images(2), fallback="silent")
    for batch in (2, 4, 4, 2):
        x = images(batch)
        close(model(x), module(x))


@pytest.mark.usefixtures("quiet")
def test_threads_with_shapes_of_their_own(module, store):
    batches = [images(batch) for batch in (1, 2, 3, 4)]
    store(*batches)
    model = optimize(module, batches[0])
    wrong = []

    def run(x):
        with torch.no_grad():
            expected = module(x)
            for _ in range(20):
                if not torch.allclose(model(x), expected, atol=1e-5):
                    wrong.append(x.shape)

    threads = [threading.Thread(target=run, args=(x,)) for x in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert model.plan.route_for(frozen=False) == PROGRAM
