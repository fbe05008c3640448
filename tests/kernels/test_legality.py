"""The first reason that holds is the one that is told."""

from __future__ import annotations

import pytest

from plantune.errors import IllegalCandidate
from plantune.kernels.legality import first_reason, refuse


def test_the_first_reason_that_holds_is_told():
    assert first_reason({}) is None
    assert first_reason({"odd": 0, "empty": False}) is None
    assert first_reason({"odd": 0, "large": 1, "late": True}) == "large"


def test_a_step_is_refused_by_it():
    refuse({"odd": 0})
    with pytest.raises(IllegalCandidate, match=r"^large$"):
        refuse({"odd": 0, "large": 1, "late": True})
