"""Captured passes hand out results as they lie in eager, in the caller's memory or copied."""

from __future__ import annotations

import pytest

from ..strides import PREFERENCES, plan_everything, run_beside_eager


@pytest.mark.usefixtures("captured_modules")
@pytest.mark.parametrize("kind", PREFERENCES)
@pytest.mark.parametrize("seed", range(400, 412))
def test_of_any_network(seed: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_everything(monkeypatch, kind)
    run_beside_eager(seed)
