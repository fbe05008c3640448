"""A search on all GPUs of a machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.multigpu
def test_all_gpus_measure_and_the_plan_runs_on_each(tmp_path):
    import torch

    options = ["--batch", "8", "--budget", "20", "--no-shipped", "--gpus", "all", "--json"]
    place = ["--db", str(tmp_path / "plans.db")]
    command = [sys.executable, "-m", "plantune", "search", *options, *place]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["complete"]
    assert found["measured"] > 0
    assert "not proved" not in done.stderr
    for gpu in range(torch.cuda.device_count()):
        assert f"GPU {gpu} " in done.stderr
