"""What runs in place of a plan that loses races as it will be called: through a tuned module."""

from __future__ import annotations

import pytest
import torch

from plantune.measure.racing import race, routes
from plantune.measure.subject import Raced
from plantune.measure.timing import Effort
from plantune.plans.guess import framework_plan
from plantune.plans.workload import Workload
from plantune.runtime.module import TunedModule
from plantune.space.search_space import load_search_space

WORKLOAD = Workload("se_resnet9_fixup", batch=1)
EFFORT = Effort(budget_s=0.05, warm_up_s=0.01, retries=0)


@pytest.fixture
def plan():
    return framework_plan(WORKLOAD.graph, load_search_space("cpu"), network="se_resnet9_fixup")


@pytest.fixture
def racing(plan):
    def run(names, **options):
        given = (Raced(WORKLOAD.problem), plan, tuple(names), EFFORT, 0)
        return race.race(lambda stage: None, *given, **options)

    return run


NAMES = tuple(name for name, route in routes.ROUTES["cpu"].items() if route.stands_in)


@pytest.fixture
def called(monkeypatch):
    """The routes that tuned modules ran, once their calls were timed."""
    found = set()
    answer = TunedModule.__call__

    def call(tuned, *args):
        made = answer(tuned, *args)
        found.add(tuned.last_call().how)
        return made

    monkeypatch.setattr(TunedModule, "__call__", call)
    return found


def test_it_is_called_through_a_tuned_module(racing, called):
    found = racing(("eager", *NAMES))
    assert found.failures == {}
    assert found.timings.keys() == {"plantune", "eager", *NAMES}
    assert called == {"planned", *NAMES}


def test_eager_is_the_module_itself(racing, called):
    racing(["eager"])
    assert called == {"planned"}


def test_a_bench_tells_of_them_as_they_are_without_plantune(racing, called):
    racing(["eager", "torchscript-traced"], detailed=True)
    assert called == {"planned"}


def test_one_that_cannot_run_says_why(racing, monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("no trace of this")

    monkeypatch.setattr(torch.jit, "trace", refused)
    found = racing(["eager", "torchscript-traced"])
    assert "no trace of this" in found.failures["torchscript-traced"]
    assert found.timings.keys() == {"plantune", "eager"}
