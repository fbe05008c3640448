"""The bound of a race: where eager's error bounds too tightly, its errors in the other layout and
after other roundings do.
"""

from __future__ import annotations

import pytest
import torch

from plantune.errors import WrongResult
from plantune.measure.racing import built_routes, routes
from plantune.measure.racing.built_routes import RouteBuilder
from plantune.measure.racing.routes import RouteSpec
from plantune.measure.subject import Raced
from plantune.plans.workload import Workload

WORKLOAD = Workload("se_resnet9_fixup", batch=1)


@pytest.fixture
def racing_by(monkeypatch):
    """A route whose outputs are changed, beside an eager that is exact to the last bit."""

    def run(change, own=0.0):
        def make(module, x):
            return lambda x: change(module(x))

        monkeypatch.setitem(routes.ROUTES, "cpu", {"route": RouteSpec(make)})
        made = RouteBuilder(Raced(WORKLOAD.problem), 0)
        made._bound = own
        with torch.no_grad():
            return made.framework_route("route")

    return run


def test_what_is_as_exact_as_eager_in_the_other_layout(racing_by):
    racing_by(lambda y: y.double() * (1 + 1e-7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_rounding_to_16_bits_is_refused(racing_by, dtype):
    with pytest.raises(WrongResult, match="route gives another output"):
        racing_by(lambda y: y.to(dtype).to(y.dtype))


def test_a_result_that_is_not_finite_is_refused_at_once(racing_by, monkeypatch):
    monkeypatch.setattr(built_routes, "eager_again", lambda *given: pytest.fail("asked"))
    with pytest.raises(WrongResult, match="relative error inf"):
        racing_by(lambda y: y * torch.nan)


def test_it_is_not_made_where_the_first_one_holds(racing_by, monkeypatch):
    monkeypatch.setattr(built_routes, "eager_again", lambda *given: pytest.fail("asked"))
    racing_by(lambda y: y, own=1e-4)
