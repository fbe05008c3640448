"""The study of stable-baselines3's PPO runs; a CPU learns there as eager does."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import pytest

from ...conftest import ROOT


@pytest.mark.filterwarnings("ignore::plantune.UnplannedCall")
def test_both_ways_learn_the_same() -> None:
    pytest.importorskip("stable_baselines3")
    study = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "studies" / "ppo.py")))
    settings = study.Settings("cpu", "nature", 8, 4, 8, 16, 160)
    eager, tuned = (study.trained(settings, 0, tuned=tuned) for tuned in (False, True))
    assert eager["rewards"] == tuned["rewards"]
    assert "eager=" in tuned["calls"]
