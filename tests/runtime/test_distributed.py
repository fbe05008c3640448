"""Several processes train one network, with torch's DistributedDataParallel round it, and one hands
its weights to another.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from plantune import optimize

RANK = Path(__file__).with_name("ddp_rank.py")
RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def received(own, *, by_copy):
    """What an actor computes with the weights of process 1: in rows whose memory a collective
    wrote, or in channels_last by a copy.
    """
    network, x = own.network().eval(), own.batches()[0]
    if by_copy:
        network = network.to(memory_format=torch.channels_last)
    actor = optimize(network, x)
    with torch.no_grad():
        actor(x)
        own.receive(actor, by_copy=by_copy)
        if not by_copy:
            actor.refresh(weights_only=True)
        return actor(x)


def test_two_processes_learn_what_one_does_from_both_parts(tmp_path, close, copied_processes):
    """And weights that one sends to the other count there."""
    own = SimpleNamespace(**runpy.run_path(str(RANK)))
    command = [sys.executable, "-c", RUN, str(RANK), "1", "2", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as other:
        try:
            with own.joined(0, 2, tmp_path):
                found = own.train(0, 2)
                actors = [received(own, by_copy=by_copy) for by_copy in (False, True)]
            _, said = other.communicate(timeout=120)
        finally:
            other.kill()
    assert other.returncode == 0, said
    model = own.network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(own.STEPS):
        optimizer.zero_grad()
        for batch in own.batches()[2 * step : 2 * step + 2]:
            model(batch).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(found, model.parameters(), strict=True):
        close(ours, theirs)
    with torch.no_grad():
        for outputs in actors:
            close(outputs, own.learner()(own.batches()[0]))
