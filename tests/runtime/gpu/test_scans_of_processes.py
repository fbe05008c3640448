"""Recurrent layers whose blocks wait for each other, in several processes on one GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from subprocess import PIPE

import pytest

# Says when it is ready, waits for a word, then counts the passes that are not those of the first
# time.
PROCESS = """
import torch, plantune
from plantune.layers import {kind}
torch.manual_seed(0)
layer = {kind}(64, 512).cuda().half()
given = [torch.randn(32, 64, 64, device="cuda").half() for _ in range(10)]
dy = torch.randn(32, 64, 512, device="cuda").half()
tuned = plantune.optimize(layer, given[0], mode="train", fallback="silent")

def passes(x):
    y = tuned(x)[0]
    return [y.detach(), *torch.autograd.grad(y, [*tuned.parameters()], dy)]

wanted = [passes(x) for x in given]
assert {{"{kind}"[8:].lower() + end for end in ("_scan", "_scan_grad")}} <= {{
    choice.candidate.family for choice in tuned.plan.choices
}}
print("ready", flush=True)
input()
made = ((passes(x), first) for _ in range({rounds}) for x, first in zip(given, wanted))
print(sum(not all(map(torch.equal, *pair)) for pair in made))
"""


def passing(kind: str, rounds: int) -> subprocess.Popen[str]:
    """A process that is ready for its passes."""
    code = PROCESS.format(kind=kind, rounds=rounds)
    process = subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def begin(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["EpisodicGRU", "EpisodicLSTM"])
def test_two_processes_do_not_hear_each_other(kind: str) -> None:
    with passing(kind, rounds=300) as first, passing(kind, rounds=300) as second:
        begin(first, second)
        assert [process.communicate()[0] for process in (first, second)] == ["0\n", "0\n"]
    assert [first.returncode, second.returncode] == [0, 0]


@pytest.mark.gpu
def test_launches_that_were_aborted_leave_nothing_behind() -> None:
    """Those of a process that is killed in the midst of its launches."""
    with passing("EpisodicGRU", rounds=100_000) as killed:
        begin(killed)
        time.sleep(0.2)
        killed.kill()
    with passing("EpisodicGRU", rounds=5) as after:
        begin(after)
        assert after.communicate()[0] == "0\n"
    assert after.returncode == 0
