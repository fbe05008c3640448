"""A training pass in a capture of the caller's, after ordinary calls: these were replays, so that
in autograd's threads no library has been called yet.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

# Each in a process of its own: whatever ran before would have made the libraries' handles.
PASS = """
import sys
import torch
from torch import nn
from plantune import optimize
from plantune.runtime.calls import choose, call_table

name, scans = sys.argv[1], sys.argv[2] == "scans"
call_table.scans_on = lambda arch: lambda layers: scans
choose.is_proved = lambda plan, here: True  # as in the second process with this plan
torch.manual_seed(0)
made = {
    "gru": (lambda: nn.GRU(128, 256), (9, 24, 128)),
    "lstm": (lambda: nn.LSTM(128, 256), (9, 24, 128)),
    "linear": (lambda: nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 8)), (24, 128)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, 2)), (4, 3, 16, 16)),
}
make, shape = made[name]
model = make().cuda().half()
x = torch.randn(shape, device="cuda").half()
tuned = optimize(model, x, mode="train", fallback="silent")

def passed(model):
    y = model(x)
    y = y if isinstance(y, torch.Tensor) else y[0]
    dy = torch.linspace(-1, 1, y.numel(), device="cuda").half().view_as(y)
    return [y.detach(), *torch.autograd.grad(y, list(model.parameters()), dy)]

for _ in range(3):
    passed(tuned)
torch.cuda.synchronize()
assert tuned.last_call().how == "captured"
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    found = passed(tuned)
x.copy_(torch.randn(shape).half())
graph.replay()
torch.cuda.synchronize()
for ours, theirs in zip(found, passed(model), strict=True):
    scale = float(theirs.abs().max())
    torch.testing.assert_close(ours / scale, theirs / scale, rtol=0, atol=0.01)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("gru", "scans"), ("lstm", "scans"), ("gru", "torch"), ("lstm", "torch")),
        *(("linear", "torch"), ("conv", "torch")),
    ],
)
def test_a_training_pass_is_captured_after_replays_alone(name: str, how: str) -> None:
    given = [sys.executable, "-c", PASS, name, how]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
