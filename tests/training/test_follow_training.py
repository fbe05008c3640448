"""The script that compares runs of training holds on a CPU, and finds what is wrong."""

from __future__ import annotations

import runpy

import pytest
import torch

from ..conftest import ROOT

CPU = torch.device("cpu")


@pytest.fixture
def script():
    return runpy.run_path(str(ROOT / "tools" / "studies" / "follow_training.py"))


def test_free_runs(script):
    found = script["free"](script["Settings"](CPU, "amp", 10), 2)
    assert found["counts_are_equal"]
    assert found["counts"] == [[7], [7]]
    assert abs(found["mean_difference"]) < 0.05


def test_single_steps_from_eagers_state(script, monkeypatch):
    settings = script["Settings"](CPU, "float32", 6)
    assert script["steps"](settings, 3)["holds"]

    monkeypatch.setattr("plantune.training.update.TorchUpdate._step", lambda self: None)
    assert not script["steps"](settings, 3)["holds"]
