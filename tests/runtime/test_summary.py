"""What `tuned.summary()` says of a plan."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from plantune import optimize
from plantune.canonical import Attrs
from plantune.default_plans import hand_plan
from plantune.space.search_space import load_search_space

EVIDENCE = Attrs(ratio=0.5, ratio_low=0.4, ratio_high=0.6, baseline="eager", rivals="eager")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x)).flatten(1)
        return y.cumsum(1)


@pytest.fixture
def summary():
    module, x = Net().eval(), torch.randn(2, 3, 8, 8)
    graph = optimize(module, x).stock().graph
    plan = hand_plan(graph, load_search_space("cpu"), network="Net", without=("winograd",))
    return optimize(module, x, plan=replace(plan, evidence=EVIDENCE)).summary()


def test_it_counts_steps_and_names_ops_of_torch_with_their_lines(summary):
    assert (summary.ratio, summary.low, summary.high) == (0.5, 0.4, 0.6)
    assert summary.ours == sum(summary.families.values()) > 0
    assert (summary.framework, summary.views) == (1, 1)
    (op,) = summary.framework_ops
    first = inspect.getsourcelines(Net)[1]
    assert op.op == "aten.cumsum.default"
    assert op.line == f"{__file__}:{first + 7}"


def test_its_text_has_all_of_it(summary):
    text = str(summary)
    assert text.splitlines()[0] == "Net, batch 2, infer, float32, cpu: x 2x3x8x8 float32"
    assert "0.500 of eager's time" in text
    assert "(95 % interval 0.400 to 0.600)" in text
    assert f"{summary.ours} by plantune's kernels" in text
    assert "1 by torch's, 1 view\n1 op for which plantune has no kernels:\n" in text
    assert summary.framework_ops[0].line in text
    assert repr(summary) == text


def test_without_a_race_it_says_how_to_have_one():
    tuned = optimize(nn.Sequential(nn.Linear(2, 2)).eval(), torch.ones(1, 2))
    summary = tuned.summary()
    assert (summary.ratio, summary.ours) == (None, 0)
    assert "plantune.tune(module, *inputs)" in str(summary)
