"""Where deterministic algorithms are asked for, a plan that may have others does not run."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from plantune import UnplannedCall, optimize
from plantune.base.canonical import Attrs
from plantune.errors import InputMismatch


@pytest.fixture
def asked():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def model_of(small, images, by_hand):
    """A module with a plan whose evidence is this."""

    def make(evidence, fallback="warn"):
        plan = replace(by_hand(optimize(small, images)), evidence=Attrs(evidence))
        return optimize(small, images, plan=plan, fallback=fallback)

    return make


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("evidence", [{}, {"deterministic": 0}])
def test_a_plan_that_may_have_others_does_not_run(model_of, images, evidence):
    model = model_of(evidence)
    with pytest.warns(UnplannedCall, match="not known to be deterministic"):
        found = model(images)
    assert torch.equal(found, model.reference(images))
    with pytest.raises(InputMismatch, match="not known to be deterministic"):
        model_of(evidence, fallback="error")(images)


@pytest.mark.usefixtures("asked")
def test_a_plan_that_has_none_runs(model_of, images, close):
    model = model_of({"deterministic": 1}, fallback="error")
    close(model(images), model.reference(images))


@pytest.mark.usefixtures("asked")
def test_a_plan_that_runs_eagerly_obeys_torch_itself(small, images, by_hand):
    plan = replace(by_hand(optimize(small, images)), route="eager")
    model = optimize(small, images, plan=plan, fallback="error")
    assert torch.equal(model(images), small(images))


def test_it_counts_as_it_is_in_each_call(model_of, images):
    model = model_of({})
    planned = model(images)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.warns(UnplannedCall):
            model(images)
    finally:
        torch.use_deterministic_algorithms(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(images), planned)
