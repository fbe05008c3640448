"""The words of the code, and what files have for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plantune.base.canonical import Attrs
from plantune.kernels.family import Candidate
from plantune.kernels.registry import all_families
from plantune.plans.plan import Choice, Plan
from plantune.plans.written_words import (
    FRAMEWORK,
    GUESS,
    HAND,
    MEASURED,
    OF_FRAMEWORK,
    PREDICTED,
    WRITTEN_ORIGINS,
)

OURS = (Choice(("conv",), Candidate("gemm", Attrs(layout="nchw"))),)
TORCHS = (
    Choice(("conv",), Candidate("framework", Attrs(layout="nchw"))),
    Choice(("flat",), Candidate("view", Attrs())),
)


@pytest.fixture
def made(plan):
    """A plan with other choices."""
    problem = replace(plan.problem, order=())
    return lambda origin, choices: replace(plan, problem=problem, choices=choices, origin=origin)


# As every release so far wrote them.
@pytest.mark.parametrize(
    ("origin", "choices", "written"),
    [
        (FRAMEWORK, TORCHS, "default"),
        (GUESS, OURS, "default"),
        (HAND, OURS, "hand"),
        (HAND, TORCHS, "hand"),
        (MEASURED, OURS, "measured"),
        (MEASURED, TORCHS, "measured"),
        (PREDICTED, OURS, "predicted"),
    ],
)
def test_an_origin_is_read_as_it_was_before_it_was_written(made, origin, choices, written):
    plan = made(origin, choices)
    assert plan.to_json()["origin"] == plan.written_origin == written
    assert Plan.loads(plan.dumps()) == plan


def test_each_origin_has_a_written_word():
    assert set(WRITTEN_ORIGINS) == {FRAMEWORK, GUESS, HAND, PREDICTED, MEASURED}


@pytest.mark.parametrize("origin", WRITTEN_ORIGINS)
def test_calls_run_the_framework_and_guesses_until_a_search_was_made(made, origin):
    assert made(origin, OURS).is_unsearched == (origin in (FRAMEWORK, GUESS))


def test_the_families_of_the_framework_are_there():
    assert all_families().keys() >= OF_FRAMEWORK
