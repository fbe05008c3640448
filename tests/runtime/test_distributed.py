"""Several processes train one network, with torch's DistributedDataParallel round it."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import torch

RANK = Path(__file__).with_name("ddp_rank.py")


def test_two_processes_learn_what_one_does_from_both_parts(tmp_path, close):
    own = runpy.run_path(str(RANK))
    command = [sys.executable, str(RANK), "1", "2", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as other:
        found = own["train"](0, 2, tmp_path)
        _, said = other.communicate(timeout=120)
    assert other.returncode == 0, said
    model = own["network"]()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(own["STEPS"]):
        optimizer.zero_grad()
        for batch in own["batches"]()[2 * step : 2 * step + 2]:
            model(batch).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(found, model.parameters(), strict=True):
        close(ours, theirs)
