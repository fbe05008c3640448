"""Mistakes in the framework's kernels that every bound must refuse, on blocks of all sizes."""

from __future__ import annotations

import random

import pytest

from plantune.errors import WrongResult
from plantune.graph.partition import one_by_one
from plantune.kernels.registry import candidates
from plantune.measure import numerics
from plantune.measure.numerics import check
from plantune.plans.checked_plan import check_plan
from plantune.runtime.proof import recheck as recheck_module
from plantune.runtime.proof.recheck import recheck

pytestmark = pytest.mark.filterwarnings("ignore:.*is in training mode")
SEEDS = range(36)
# A mistake shows where it moves a result by so many times the framework's error in either layout,
# and by more than the luck of float32: 170 of its roundings. Where a gradient is zero but for
# rounding, another order has 32 times as much.
CLEARLY, LEAST = 40.0, 2e-5
MUTANTS = (
    "rounded to bfloat16",
    "rounded to float16",
    "in tf32",
    "a missing border",
    "two swapped scalars",
)


@pytest.fixture
def placed(part):
    """Cases in float32, each with a node that can have the mistake, and numbers to choose with."""

    def of(mutant):
        for seed in SEEDS:
            case = part("cases").case_of(seed, part("cases").Asked(dtypes=("float32",)))
            places = part("mutants").places(mutant, case.graph)
            if places:
                rng = random.Random(f"{mutant} {seed}")
                yield case, rng.choice(places), rng

    return of


@pytest.fixture
def step_shows(monkeypatch):
    """The mistakes that show in the runs of a step's proof: full of them, or empty."""
    seen, plain = [], numerics._errors

    def noted(trial, results, scene):
        errors = plain(trial, results, scene)
        own = max(max(kinds) for kinds in scene.own)
        if max(max(kinds) for kinds in errors) > CLEARLY * own + LEAST:
            seen.append(errors)
        return errors

    monkeypatch.setattr(numerics, "_errors", noted)
    return seen


@pytest.fixture
def network_shows(monkeypatch):
    """The results of a network's proof in which a mistake shows."""
    seen, plain, draws = [], recheck_module.distances, []

    def noted(graph, ours, theirs, exact):
        found = dict(plain(graph, ours, theirs, exact))
        if ours is not theirs:
            draws[:] = [found]
        elif len(draws) < 3:
            draws.append(found)
        if len(draws) == 3:  # the plan's, and the framework's in each layout
            seen.extend(_shown(draws))
        return found.items()

    monkeypatch.setattr(recheck_module, "distances", noted)
    return seen


def _shown(draws):
    """Gradients jump together, where the input of a ReLU is almost zero."""
    theirs = {what: max(each[what].theirs for each in draws) for what in draws[0]}
    jump = max([own for what, own in theirs.items() if "gradient" in what], default=0.0)
    for what, distance in draws[0].items():
        own = max(theirs[what], jump) if "gradient" in what else theirs[what]
        if distance.ours > CLEARLY * own + LEAST:
            yield what


def refused(prove):
    try:
        prove()
    except WrongResult:
        return True
    return False


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_proof_of_a_step_refuses_it(part, placed, mutant, step_shows):
    outcomes = []
    for case, place, rng in placed(mutant):
        step = next(s for s in one_by_one(case.graph) if place in s.nodes)
        candidate = rng.choice(candidates(step, case.space, ("framework",)))
        step_shows.clear()
        with part("mutants").mutated(mutant, place):
            found = refused(lambda: check(step, candidate, case.space, case.seed))  # noqa: B023
        outcomes += [(case.text, place.op, found)] if step_shows else []
    assert [outcome for outcome in outcomes if not outcome[-1]] == []
    assert len(outcomes) >= 10


# Their proofs are the longest: of a network they run in slow tests, of a step always.
ROUNDED = ("rounded to float16", "in tf32")


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(each, marks=[pytest.mark.slow] if each in ROUNDED else []) for each in MUTANTS],
)
def test_the_proof_of_a_network_refuses_it(part, placed, mutant, network_shows):
    outcomes = []
    for case, place, rng in placed(mutant):
        plan = case.plan(rng.choice(("nchw", "nhwc")))
        network_shows.clear()
        with part("mutants").mutated(mutant, place):
            found = refused(lambda: recheck(check_plan(plan, case.graph, case.space), case.module))  # noqa: B023
        outcomes += [(case.text, place.name, found)] if network_shows else []
    assert [outcome for outcome in outcomes if not outcome[-1]] == []
    assert len(outcomes) >= 10
