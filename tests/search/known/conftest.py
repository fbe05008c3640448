"""What the tests of known plans share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.guess import COMPILED, framework_plan, hand_plan
from plantune.search import sought
from plantune.search.contenders import known
from plantune.search.results import SearchOptions
from plantune.search.sought import Sought
from plantune.search.step_search import StepSearch

from .searching import HERE, PROBLEM, FakeWorker, family, search_of


@pytest.fixture
def database():
    with PlanDatabase.in_memory() as opened:
        yield opened


@pytest.fixture
def worker():
    return FakeWorker()


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch):
    monkeypatch.setattr(known, "stored_plans_in", lambda path: [])


@pytest.fixture
def by_hand():
    def plan(problem, **changes):
        space = Sought(problem.graph, problem.problem).space
        made = hand_plan(problem.graph, space, network=problem.network, without=COMPILED)
        return replace(made, origin="measured", **changes)

    return plan


@pytest.fixture
def uncommon(by_hand):
    """Makes a plan that no other part of a search would come upon."""

    def plan(problem):
        made, space = by_hand(problem), Sought(problem.graph, problem.problem).space
        number = next(i for i, c in enumerate(made.choices) if family(c) == "onednn_conv")
        plain = framework_plan(problem.graph, space, network=problem.network)
        alone = [c for c in plain.choices if c.nodes[0] in made.choices[number].nodes]
        assert len(made.choices[number].nodes) == len(alone)
        rest = (*made.choices[:number], *made.choices[number + 1 :])
        return replace(made, choices=(*rest, *alone))

    return plan


@pytest.fixture
def guess(uncommon, monkeypatch):
    """What calls use without a plan."""
    made = replace(uncommon(PROBLEM), origin="guess")
    monkeypatch.setattr(sought, "guessed_plan", lambda graph, space, network: made)
    return made


@pytest.fixture
def searched(database, worker, monkeypatch):
    """A search that measures nothing but what it begins with."""
    monkeypatch.setattr(StepSearch, "run", lambda steps, budget, report: None)

    def run(budget_s=30.0, **settings):
        return search_of(PROBLEM, SearchOptions(budget_s, **settings), database, HERE).run(worker)

    return run
